"""A client of `ragfuse serve` that answers prompts as an `Engine` in this process does, without a model or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ragfuse.errors import BusyError, ServerError
from ragfuse.remote.address import ServerAddress, address_of
from ragfuse.remote.remote_engine import RemoteEngine

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine

__all__ = ["Answerer", "BusyError", "RemoteEngine", "ServerAddress", "ServerError", "address_of", "is_answerer"]

Answerer: TypeAlias = "Engine | RemoteEngine"
"""What programs ask: an engine in their process, or one that passes everything on to a server."""


def is_answerer(value: object) -> bool:
    """Return whether a value is an engine or answers like one; no property of it is read."""
    return all(hasattr(type(value), name) for name in ("card", "count_tokens", "stream"))
