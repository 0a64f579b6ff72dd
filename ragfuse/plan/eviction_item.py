"""What is dropped as one, and the order in which a policy drops it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ragfuse.types.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class EvictionItem:
    """What is dropped or moved as one: all that a tier has of a conversation, or an entry that belongs to none.

    AttentionStore, section 3.3.2: a conversation's KV is used whole or not at all. name: the conversation's, or the
    key itself. last_used: of the entry used last; arrived: of the one that came first, seconds.
    """

    name: Hashable
    keys: tuple[ChunkKey, ...]
    nbytes: int
    last_used: float
    arrived: float = 0.0


Rank = Callable[[EvictionItem, float | None], tuple[int, float]]
"""Who goes first: the smaller. Given an item and the place of its first waiting job, a number that grows from the head
of the queue to its tail; None where none is known to wait."""
