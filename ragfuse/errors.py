"""Every error that ragfuse raises on purpose.

    RagFuseError
    ├── SettingsError      a setting, flag or argument is not usable
    ├── InputError         a path, document or prompt cannot be read
    │   ├── OverlongError  a prompt, chunk or schema that is longer than the model takes
    │   └── PMLError       a schema or prompt in PML, or a template or program that stands for one, with the line
    ├── ModelError         a model cannot be found, loaded or prepared
    │   └── RefusedError   a model whose KV cannot be placed elsewhere (answers fall back to full prefill)
    │       └── FixedError    but may be used where it was encoded: modules of a schema never move
    ├── BusyError          no room for another request now; it says when to come again
    └── StoreError         the store itself is not usable (a bad entry never is: it is a miss)

A message says what was wanted, what was found, and what to do. A cache miss is never an error.
"""


class RagFuseError(Exception):
    """Base of all errors below; catching it catches everything ragfuse raises on purpose."""


class SettingsError(RagFuseError):
    """A setting, flag or argument that cannot be used as given."""


class InputError(RagFuseError):
    """A path, document or prompt that cannot be read or has nothing to read."""


class OverlongError(InputError):
    """A text that is longer than its model takes, in tokens."""


class PMLError(InputError):
    """A schema or prompt that cannot be read, laid out or bound: what was found at which line, what was wanted.

    line and column count from 1; 0 where the thing was not read from text.
    """

    def __init__(self, found: str, wanted: str, file: str = "", line: int = 0, column: int = 0) -> None:
        self.file, self.line, self.column, self.found, self.wanted = file, line, column, found, wanted
        place = f"{file or 'PML'}:{line}:{column}" if line else file or "PML"
        super().__init__(f"{place}: found {found}; wanted {wanted}.")


class ModelError(RagFuseError):
    """A model that cannot be found, loaded or prepared."""


class RefusedError(ModelError):
    """A model whose cached KV cannot be moved or fused, with the reason."""


class FixedError(RefusedError):
    """A model whose cached KV is right where it was encoded, and nowhere else."""


class StoreError(RagFuseError):
    """A store that cannot be opened or written as a whole."""


class BusyError(RagFuseError):
    """A queue that has no room for another request now; after `wait_s` seconds it may have some."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
