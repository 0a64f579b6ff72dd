"""The item that is evicted as a whole, and the rank by which a policy orders items."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ragfuse.types.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class EvictionItem:
    """All entries of a conversation in one tier, or a single entry that belongs to none; evicted or
    moved as a whole.

    A conversation's KV is used whole or not at all (AttentionStore, section 3.3.2).

    Args:
        name: The name of the conversation, or the key itself.
        keys: Keys of the entries.
        nbytes: Bytes of all entries.
        last_used: When the most recently used entry was used, in seconds.
        arrived: When the oldest entry was stored, in seconds.
    """

    name: Hashable
    keys: tuple[ChunkKey, ...]
    nbytes: int
    last_used: float
    arrived: float = 0.0


Rank = Callable[[EvictionItem, float | None], tuple[int, float]]
"""An eviction policy, a pure function: the item with the smallest rank is evicted first. Arguments:
an item, and the queue position of its first waiting job, which grows from head to tail (None: no
job waits for it).
"""
