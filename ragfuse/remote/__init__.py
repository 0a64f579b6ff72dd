"""A client of `ragfuse serve` that answers prompts as an `Engine` in this process does, without a model or torch."""

from ragfuse.errors import BusyError, ServerError
from ragfuse.remote.address import ServerAddress
from ragfuse.remote.answerer import Answerer
from ragfuse.remote.remote_engine import RemoteEngine

__all__ = ["Answerer", "BusyError", "RemoteEngine", "ServerAddress", "ServerError"]
