"""Exceptions that ragfuse raises.

    RagFuseError
    ├── SettingsError      a setting, flag or argument is not usable
    ├── InputError         a path, document or prompt cannot be read
    │   ├── NoSessionError a named session does not exist
    │   ├── OverlongError  a prompt, chunk or schema is longer than the model's context
    │   └── PMLError       a schema, prompt, template or program of PML is wrong; with its line
    ├── ModelError         a model cannot be found, loaded or prepared
    │   └── RefusedError   its KV cannot be moved to other positions: uses full prefill
    │       └── FixedError    its KV can be reused at its own positions: enough for modules
    ├── BusyError          a server cannot answer now; the error says when to try again
    ├── ServerError        a server is unreachable, rejects the key, is not ragfuse or hung up
    ├── StoreError         the store is not usable (a single bad entry is a miss, no error)
    └── TransferError      KV for another engine cannot be written or has a wrong format

A message says what was wanted, what was found, and what to do. A cache miss is never an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RagFuseError(Exception):
    """The base class of all errors that ragfuse raises.

    Args:
        message: What was wanted, what was found, what to do.
        argument: The setting, field or argument at fault, by its name in Python; "" for none.
    """

    def __init__(self, message: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


@contextmanager
def about(argument: str) -> Iterator[None]:
    """Set `argument` of errors that leave the block without one. Also a decorator."""
    try:
        yield
    except RagFuseError as error:
        error.argument = error.argument or argument
        raise


class SettingsError(RagFuseError):
    """A setting, flag or argument that cannot be used as given."""


class InputError(RagFuseError):
    """A path, document or prompt that cannot be read, or is empty."""


class NoSessionError(InputError):
    """A named session that does not exist.

    Args:
        found: What was wanted and found.
        advice: The fix, as a command line.
    """

    def __init__(self, found: str, advice: str = "") -> None:
        self.found, self.advice = found, advice
        super().__init__(f"{found} {advice}".strip(), "session")


class OverlongError(InputError):
    """A text, alone or with its answer, that exceeds the model's context."""


class PMLError(InputError):
    """A schema or prompt in PML (Prompt Markup Language) that cannot be parsed, laid out or bound
    to its schema.

    Args:
        found: The text found at `line` and `column`.
        wanted: The text expected there.
        file: The file that was read; "" for a text.
        line: Line, counted from 1; 0 if the PML was not read from text.
        column: Column, counted from 1; 0 if the PML was not read from text.
        advice: The fix on the command line or in Python; "" if `wanted` says it.
    """

    def __init__(
        self,
        found: str,
        wanted: str,
        file: str = "",
        line: int = 0,
        column: int = 0,
        advice: str = "",
    ) -> None:
        self.file, self.line, self.column = file, line, column
        self.found, self.wanted, self.advice = found, wanted, advice
        place = f"{file or 'PML'}:{line}:{column}" if line else file or "PML"
        super().__init__(f"{place}: found {found}; wanted {wanted}. {advice}".strip())


class ModelError(RagFuseError):
    """A model that cannot be found, loaded or prepared."""


class RefusedError(ModelError):
    """A model whose cached KV cannot be moved or fused; the message says why."""


class FixedError(RefusedError):
    """A model whose cached KV can be reused only at the positions at which it was encoded."""


class StoreError(RagFuseError):
    """A store that cannot be opened or written at all; a single bad entry is only a miss."""


class TransferError(RagFuseError):
    """KV for another engine that cannot be written, or that does not fit that engine."""


class ServerError(RagFuseError):
    """A server that is unreachable, rejects the key, is not ragfuse, or closed the connection."""


class BusyError(RagFuseError):
    """A server that cannot answer now: it is busy, stopping or too slow. Retry after `wait_s`.

    Args:
        message: What was wanted and found.
        wait_s: Seconds after which to try again.
    """

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
