"""A client of `ragfuse serve` with an `Engine`'s methods. It needs neither a model nor torch."""

from ragfuse.errors import BusyError, ServerError
from ragfuse.remote.remote_engine import RemoteEngine

__all__ = ["BusyError", "RemoteEngine", "ServerError"]
