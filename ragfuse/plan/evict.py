"""Eviction: the order in which a full tier drops entries, and expiry of unused entries.

An eviction policy is a `Rank`, a function that orders stored items. `ConversationEvictor` sorts a
tier's items by a `Rank`.
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
    """What a tier evicts at once: a conversation's entries, or one entry without a conversation.

    A conversation's KV is used whole or not at all (AttentionStore 3.3.2).

    Args:
        name: The name of the conversation, or the key of the single entry.
        keys: Keys of the entries.
        nbytes: Bytes of all entries.
        last_used: Time of the latest use of any entry, in seconds since the epoch.
        arrived: Time at which the oldest entry was stored, in seconds since the epoch. 0 if
            unknown.
    """

    name: Hashable
    keys: tuple[ChunkKey, ...]
    nbytes: int
    last_used: float
    arrived: float = 0.0


Rank = Callable[[EvictionItem, float | None], tuple[int, float]]
"""An eviction policy: a pure function that returns the rank of an item. The item with the smallest
rank is evicted first.

The arguments are an item and a position in the job queue, counted from the head. The position is
that of the first waiting job that needs the item, or None if no waiting job needs the item.
"""


Evictor = Callable[[Iterable[Entry]], Iterable[Iterable[ChunkKey]]]
"""A function that gets a tier's entries, least recently used first, and returns the keys to drop.

Keys come in groups, in order of eviction. A tier drops whole groups until enough bytes are free.
Pinned entries are never dropped.
"""

ConversationOf = Callable[[ChunkKey], Hashable]
"""A function that returns the name of the conversation that uses a key, or None."""


def by_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items for eviction by last use: evict the least recently used item first."""
    return 0, item.last_used


def by_next_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items for eviction by the next use in the job queue (AttentionStore 3.3.2).

    Items that no waiting job needs are evicted first, in the order of their last use. Then the
    items that jobs need are evicted, beginning with the item that is needed last.
    """
    return (0, item.last_used) if place is None else (1, -place)


def rank_named(name: str) -> Rank:
    """Return the rank function of the eviction policy `name`, a key of `EVICTION_POLICIES`."""
    module, _, function = EVICTION_POLICIES[name].partition(":")
    found: Rank = getattr(import_module(module), function)
    return found


@dataclass(frozen=True, slots=True)
class ConversationEvictor:
    """An `Evictor` that drops whole conversations in the order of an eviction policy.

    All entries of the tier are read, not only the least recently used entries, because the policy
    `look-ahead` ranks all entries.

    Args:
        rank: The eviction policy.
        conversation_of: Returns the conversation that uses a key.
        places: Returns the current queue position of each conversation's first waiting job.
        ttl_s: Seconds without use after which items are expired. Expired items are dropped before
            all other items.
        now: Returns the current time in seconds since the epoch.
    """

    rank: Rank
    conversation_of: ConversationOf
    places: Callable[[], Mapping[Hashable, float]] = dict
    ttl_s: float = inf
    now: Callable[[], float] = lambda: 0.0

    def __call__(self, entries: Iterable[Entry]) -> Iterator[Iterable[ChunkKey]]:
        """Yield the keys of each item to drop, in order. Items with a pinned entry are skipped."""
        oldest_s, places = self.now() - self.ttl_s, self.places()
        groups: dict[Hashable, list[Entry]] = {}
        for entry in entries:
            name = self.conversation_of(entry.key)
            groups.setdefault(entry.key if name is None else name, []).append(entry)
        items = [
            EvictionItem(
                name,
                tuple(entry.key for entry in found),
                sum(entry.nbytes for entry in found),
                max(entry.last_used for entry in found),
            )
            for name, found in groups.items()
            if not any(entry.pinned for entry in found)
        ]

        def order(item: EvictionItem) -> tuple[bool, tuple[float, float]]:
            is_expired = item.last_used < oldest_s
            return not is_expired, (0, 0) if is_expired else self.rank(item, places.get(item.name))

        for item in sorted(items, key=order):
            yield item.keys


def lru(entries: Iterable[Entry]) -> Iterator[Iterable[ChunkKey]]:
    """Yield the key of each unpinned entry as a group of one key, in the order of `entries`."""
    for entry in entries:
        if not entry.pinned:
            yield (entry.key,)


def expired(entries: Iterable[Entry], now_s: float, ttl_s: float) -> Iterator[ChunkKey]:
    """Yield the keys of unpinned entries that, at `now_s`, were unused for over `ttl_s` seconds."""
    for entry in entries:
        if not entry.pinned and now_s - entry.last_used > ttl_s:
            yield entry.key
