"""A client of `ragfuse serve` with the interface of an `Engine`, without model or torch."""

from ragfuse.errors import BusyError, ServerError
from ragfuse.remote.remote_engine import RemoteEngine

__all__ = ["BusyError", "RemoteEngine", "ServerError"]
