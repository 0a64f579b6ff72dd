"""Every error that ragfuse raises on purpose.

    RagFuseError
    ├── SettingsError      a setting, flag or argument is not usable
    ├── InputError         a path, document or prompt cannot be read
    │   ├── NoSessionError there is no session of a name
    │   ├── OverlongError  a prompt, chunk or schema is longer than the model's context
    │   └── PMLError       a schema, prompt, template or program of PML is wrong; with its line
    ├── ModelError         a model cannot be found, loaded or prepared
    │   └── RefusedError   its KV cannot be reused at other positions: answers by full prefill
    │       └── FixedError    its KV can be reused where it was encoded: enough for modules
    ├── BusyError          the queue is full; the error says when to try again
    ├── ServerError        a server is not reached, refuses the key, is another or broke off
    ├── StoreError         the store is not usable (a single bad entry is a miss, no error)
    └── TransferError      KV for another engine is not written, or not what it needs

A message says what was wanted, what was found, and what to do. A cache miss is never an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RagFuseError(Exception):
    """The base class of all errors that ragfuse raises on purpose.

    Args:
        message: What was wanted, what was found, what to do.
        argument: The setting, field or argument that it is about, as a program in Python names it;
            "" for none.
    """

    def __init__(self, message: str = "", argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


@contextmanager
def about(argument: str) -> Iterator[None]:
    """Let errors that name no argument be about this one; a block or a decorator."""
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
    """A session that is named and does not exist.

    Args:
        found: What was wanted and found.
        advice: What to do, in words for whoever has the command line.
    """

    def __init__(self, found: str, advice: str = "") -> None:
        self.found, self.advice = found, advice
        super().__init__(f"{found} {advice}".strip(), "session")


class OverlongError(InputError):
    """A text with more tokens than the model's context holds, or an answer that would have more."""


class PMLError(InputError):
    """A schema or prompt in PML (Prompt Markup Language) that cannot be parsed, laid out or bound
    to its schema.

    Args:
        found: What stands at that place.
        wanted: What should stand there.
        file: The file it was read from; "" for a text.
        line: Line, counted from 1; 0 where it was not read from text.
        column: Column, counted from 1; 0 where it was not read from text.
        advice: What to do, in words for whoever has the command line or Python; "" where `wanted`
            says it.
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
    """A store that cannot be opened or written as a whole."""


class TransferError(RagFuseError):
    """KV on its way to another engine that cannot be written, or is not what that engine needs."""


class ServerError(RagFuseError):
    """A server that is unreachable, refuses the key, is no ragfuse server, or broke off."""


class BusyError(RagFuseError):
    """A request queue that is full.

    Args:
        message: What was wanted and found.
        wait_s: Seconds after which to try again.
    """

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
