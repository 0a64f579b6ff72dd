"""A client of `ragfuse serve` that answers prompts as an `Engine` in this process does, without a
model or torch.
"""

from ragfuse.errors import BusyError, ServerError
from ragfuse.remote.remote_engine import RemoteEngine

__all__ = ["BusyError", "RemoteEngine", "ServerError"]
