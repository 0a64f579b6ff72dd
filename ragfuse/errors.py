"""Exceptions that ragfuse raises.

    RagFuseError
    ├── SettingsError      a setting, flag or argument is not usable
    ├── InputError         a path, document or prompt cannot be read
    │   ├── NoSessionError a named session does not exist
    │   ├── OverlongError  a prompt, chunk or schema is longer than the model's context
    │   └── PMLError       a schema, prompt, template or program in PML is wrong
    ├── ModelError         a model cannot be found, loaded or prepared
    │   └── RefusedError   the model's cached KV cannot be reused: prompts use full prefill
    │       └── FixedError    cached KV can be reused only at its original positions (modules)
    ├── BusyError          a server cannot answer now; the error says when to try again
    ├── ServerError        a server is unreachable, rejects the key, is not ragfuse or disconnects
    ├── StoreError         the store is not usable (a single bad entry is only a miss)
    └── TransferError      KV for another engine cannot be written or has a wrong format

A message says what was wanted, what was found, and what to do. A cache miss is never an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RagFuseError(Exception):
    """The base class of all errors that ragfuse raises.

    Args:
        message: What was wanted, what was found, what to do.
        argument: Python name of the setting, field or argument at fault. "" means no argument.
    """

    def __init__(self, message: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


@contextmanager
def about(argument: str) -> Iterator[None]:
    """Fill in a missing `argument` on each RagFuseError that leaves the block or function."""
    try:
        yield
    except RagFuseError as error:
        error.argument = error.argument or argument
        raise


class SettingsError(RagFuseError):
    """Raised if a setting, flag or argument cannot be used as given."""


class InputError(RagFuseError):
    """Raised if a path, document or prompt cannot be read, or is empty."""


class NoSessionError(InputError):
    """Raised if a named session does not exist.

    Args:
        found: A sentence that names the missing session.
        advice: A sentence with a command that helps.
    """

    def __init__(self, found: str, advice: str = "") -> None:
        self.found, self.advice = found, advice
        super().__init__(f"{found} {advice}".strip(), "session")


class OverlongError(InputError):
    """Raised if a text, alone or with its answer, is longer than the model's context."""


class PMLError(InputError):
    """Raised if PML (Prompt Markup Language) cannot be parsed, a schema cannot be laid out, or a
    prompt does not fit its schema.

    Args:
        found: What is at `line` and `column`, in words.
        wanted: What was expected there, in words.
        file: The file that was read; "" if the PML was not read from a file.
        line: Line number, from 1; 0 if the PML was not read from text.
        column: Column number, from 1; 0 if the PML was not read from text.
        advice: The fix on the command line or in Python; "" if `wanted` is advice enough.
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
    """Raised if a model cannot be found, loaded or prepared."""


class RefusedError(ModelError):
    """Raised for a model whose cached KV cannot be moved to other positions or fused."""


class FixedError(RefusedError):
    """Raised for a model whose cached KV can be reused only at its original token positions."""


class StoreError(RagFuseError):
    """Raised if a store cannot be opened or written at all. A single bad entry is only a miss."""


class TransferError(RagFuseError):
    """Raised if KV for another engine cannot be written, or does not fit that engine."""


class ServerError(RagFuseError):
    """Raised if a server is unreachable, rejects the key, is not ragfuse, or disconnects."""


class BusyError(RagFuseError):
    """Raised if a server is busy, stopping or too slow. Retry after `wait_s`.

    Args:
        message: What was wanted and found.
        wait_s: Seconds after which to try again.
    """

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
