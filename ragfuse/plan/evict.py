"""Eviction: the order in which a full tier drops entries, and expiry.

An eviction policy is an order over stored items (`Rank`); `ConversationEvictor` sorts a tier's
entries by it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import inf

from ragfuse.types.choices import EVICTION_POLICIES
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


@dataclass(frozen=True, slots=True)
class EvictionItem:
    """All entries of a conversation in one tier, or a single entry outside any; evicted or moved as
    a whole.

    A conversation's KV is used whole or not at all (AttentionStore 3.3.2).

    Args:
        name: The name of the conversation, or the key itself.
        keys: Keys of the entries.
        nbytes: Bytes of all entries.
        last_used: Time of the latest use of any entry, in seconds.
        arrived: Time at which the oldest entry was stored, in seconds.
    """

    name: Hashable
    keys: tuple[ChunkKey, ...]
    nbytes: int
    last_used: float
    arrived: float = 0.0


Rank = Callable[[EvictionItem, float | None], tuple[int, float]]
"""An eviction policy, a pure function: the item with the smallest rank is evicted first. Arguments:
an item, and the queue position of its first waiting job, counted from the head (None: no job).
"""


Evictor = Callable[[Iterable[Entry]], Iterable[Iterable[ChunkKey]]]
"""A function from a tier's entries, least recently used first, to the keys to drop, in order.

Keys come in groups, each dropped whole; a tier stops once there is room. Pinned entries are never
dropped.
"""

ConversationOf = Callable[[ChunkKey], Hashable]
"""A function from a key to the name of its conversation, or None."""


def by_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items by last use: least recently used first."""
    return 0, item.last_used


def by_next_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items without a waiting job first, by last use; then by position, tail of the queue
    first (AttentionStore 3.3.2).
    """
    return (0, item.last_used) if place is None else (1, -place)


def rank_named(name: str) -> Rank:
    """Return the rank function of a policy, one of `EVICTION_POLICIES`."""
    module, _, function = EVICTION_POLICIES[name].partition(":")
    found: Rank = getattr(import_module(module), function)
    return found


def items(entries: Iterable[Entry], conversation_of: ConversationOf) -> list[EvictionItem]:
    """Group a tier's unpinned entries into items that are evicted together."""
    groups: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        name = conversation_of(entry.key)
        groups.setdefault(entry.key if name is None else name, []).append(entry)
    return [
        EvictionItem(
            name,
            tuple(entry.key for entry in found),
            sum(entry.nbytes for entry in found),
            max(entry.last_used for entry in found),
        )
        for name, found in groups.items()
        if not any(entry.pinned for entry in found)
    ]


@dataclass(frozen=True, slots=True)
class ConversationEvictor:
    """An `Evictor` that drops whole conversations in the order of a policy.

    It reads all entries of the tier, not only the least recently used ones, because look-ahead
    ranks all of them.

    Args:
        rank: The policy.
        conversation_of: The conversation of a key.
        places: Returns the current queue position of each conversation's first job.
        ttl_s: Conversations unused for longer are dropped before all others.
        now: The current time in seconds since the epoch.
    """

    rank: Rank
    conversation_of: ConversationOf
    places: Callable[[], Mapping[Hashable, float]] = dict
    ttl_s: float = inf
    now: Callable[[], float] = lambda: 0.0

    def __call__(self, entries: Iterable[Entry]) -> Iterator[Iterable[ChunkKey]]:
        """Yield the keys of each conversation to drop, in order; skip any with a pinned entry."""
        oldest_s, places = self.now() - self.ttl_s, self.places()

        def order(item: EvictionItem) -> tuple[bool, tuple[float, float]]:
            is_expired = item.last_used < oldest_s
            return not is_expired, (0, 0) if is_expired else self.rank(item, places.get(item.name))

        for item in sorted(items(entries, self.conversation_of), key=order):
            yield item.keys


def lru(entries: Iterable[Entry]) -> Iterator[Iterable[ChunkKey]]:
    """Yield the keys of unpinned entries, each as its own group, in the given order."""
    for entry in entries:
        if not entry.pinned:
            yield (entry.key,)


def expired(entries: Iterable[Entry], now_s: float, ttl_s: float) -> Iterator[ChunkKey]:
    """Yield the keys of unpinned entries unused for more than `ttl_s` seconds at `now_s`."""
    for entry in entries:
        if not entry.pinned and now_s - entry.last_used > ttl_s:
            yield entry.key
