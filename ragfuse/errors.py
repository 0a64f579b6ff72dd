"""Every error that ragfuse raises on purpose.

    RagFuseError
    ├── SettingsError      a setting, flag or argument is not usable
    ├── InputError         a path, document or prompt cannot be read
    ├── ModelError         a model cannot be found, loaded or prepared
    │   └── RefusedError   a model whose KV cannot be placed elsewhere (answers fall back to full prefill)
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


class ModelError(RagFuseError):
    """A model that cannot be found, loaded or prepared."""


class RefusedError(ModelError):
    """A model whose cached KV cannot be moved or fused, with the reason."""


class StoreError(RagFuseError):
    """A store that cannot be opened or written as a whole."""


class BusyError(RagFuseError):
    """A queue that has no room for another request now; after `wait_s` seconds it may have some."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
