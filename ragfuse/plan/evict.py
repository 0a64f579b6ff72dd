"""Eviction: what to drop when a tier is full, or an entry too old. Decisions only, no clock, file or tensor is read.

An eviction policy is an order over the stored items (`Rank`). `ConversationEvictor` sorts the entries of a
tier by it; `EvictionOrder` (`eviction_order.py`) maintains the same order while items change one by one. Windows and
prefetching are in `look_ahead.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from ragfuse.errors import SettingsError
from ragfuse.plan.eviction_item import EvictionItem, Rank
from ragfuse.plan.ranks import rank_named
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Evict = Callable[[Sequence[Entry]], Iterable[ChunkKey]]
"""A function from the entries of a tier to the keys to drop, in order."""

ConversationOf = Callable[[ChunkKey], Hashable]
"""A function from a key to the name of its conversation; None for a key that belongs to none."""


def _no_conversation(key: ChunkKey) -> Hashable:
    return None


def _arrived_at_zero(key: ChunkKey) -> float:
    return 0.0


def _no_clock() -> float:
    return 0.0


def items(
    entries: Iterable[Entry],
    conversation_of: ConversationOf = _no_conversation,
    arrived: Callable[[ChunkKey], float] = _arrived_at_zero,
) -> list[EvictionItem]:
    """Group entries into items that are evicted together, in order of first appearance.

    Items with a pinned entry are left out.

    Args:
        entries: Entries of a tier.
        conversation_of: The conversation of a key.
        arrived: When a key was stored, in seconds.
    """
    groups: dict[Hashable, list[Entry]] = {}
    for entry in entries:
        name = conversation_of(entry.key)
        groups.setdefault(entry.key if name is None else name, []).append(entry)
    return [
        EvictionItem(
            name,
            tuple(entry.key for entry in group_entries),
            sum(entry.nbytes for entry in group_entries),
            max(entry.last_used for entry in group_entries),
            min(arrived(entry.key) for entry in group_entries),
        )
        for name, group_entries in groups.items()
        if not any(entry.pinned for entry in group_entries)
    ]


def ranked(found: Iterable[EvictionItem], rank: Rank, places: Mapping[Hashable, float]) -> Iterator[EvictionItem]:
    """Yield items in eviction order, equal ones in the order given; the sort is lazy.

    Args:
        found: The items.
        rank: The policy.
        places: Queue position of each conversation's first waiting job.
    """
    heap = [(rank(item, places.get(item.name)), index, item) for index, item in enumerate(found)]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[2]


def nobody_waits() -> Mapping[Hashable, float]:
    """Return empty queue positions, for use without a queue."""
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ConversationEvictor:
    """An `Evict` that drops whole conversations, one after the other, in the order of a policy.

    The tier must pass all of its entries, not only the least recently used ones, because fifo and look-ahead rank the
    others too. `together` returns the keys that must be dropped with a given key.

    Args:
        rank: The policy.
        conversation_of: The conversation of a key.
        places: Gives the current queue position of each conversation's first job (`plan.look_ahead.places`).
        arrived: When a key was stored, in seconds; needed by fifo.
        ttl_s: Conversations unused for longer are dropped before all others.
        now: The current time in seconds since the epoch.
    """

    rank: Rank
    conversation_of: ConversationOf = _no_conversation
    places: Callable[[], Mapping[Hashable, float]] = nobody_waits
    arrived: Callable[[ChunkKey], float] = _arrived_at_zero
    ttl_s: float = inf
    now: Callable[[], float] = _no_clock

    def __call__(self, entries: Sequence[Entry]) -> Iterator[ChunkKey]:
        """Yield keys to drop, in order; none of a conversation with a pinned entry."""
        now_s = self.now()
        expired_items: list[EvictionItem] = []
        kept: list[EvictionItem] = []
        for item in items(entries, self.conversation_of, self.arrived):
            (expired_items if now_s - item.last_used > self.ttl_s else kept).append(item)
        for item in (*expired_items, *ranked(kept, self.rank, self.places())):
            yield from item.keys

    def together(self, one: ChunkKey, other: ChunkKey) -> bool:
        """Return whether two keys belong to one conversation, so that both are dropped or neither."""
        name = self.conversation_of(one)
        return name is not None and name == self.conversation_of(other)


def evictor(
    name: str,
    conversation_of: ConversationOf | None = None,
    places: Callable[[], Mapping[Hashable, float]] | None = None,
    arrived: Callable[[ChunkKey], float] | None = None,
) -> Evict:
    """Return the eviction policy of a name, as an `Evict`.

    Args:
        name: One of `RANKS`; `fifo` needs `arrived`, `look-ahead` needs `places`.
        conversation_of: The conversation of a key; None: entries are dropped one by one.
        places: Gives the queue position of each conversation's first job.
        arrived: When a key was stored, in seconds.

    Raises:
        SettingsError: There is no such policy, or what it needs is not given.
    """
    rank = rank_named(name)
    if name == "fifo" and arrived is None:
        raise SettingsError("The policy fifo needs `arrived`, which returns when a key was stored. Give it.")
    if name == "look-ahead" and places is None:
        raise SettingsError("The policy look-ahead needs `places`, which returns who waits at which place. Give it.")
    if name == "lru" and conversation_of is None:
        return lru
    return ConversationEvictor(
        rank, conversation_of or _no_conversation, places or nobody_waits, arrived or _arrived_at_zero
    )


def lru(entries: Iterable[Entry]) -> Iterator[ChunkKey]:
    """Yield keys to drop, least recently used first, equal ones in the order given; never pinned ones."""
    evictable = (entry for entry in entries if not entry.pinned)
    for entry in sorted(evictable, key=lambda entry: entry.last_used):
        yield entry.key


def expired(entries: Iterable[Entry], now_s: float, ttl_s: float) -> Iterator[ChunkKey]:
    """Yield keys of entries unused for more than `ttl_s` seconds at `now_s` (since the epoch), except pinned ones."""
    for entry in entries:
        if not entry.pinned and now_s - entry.last_used > ttl_s:
            yield entry.key


def expired_first(evict: Evict, ttl_s: float, now: Callable[[], float]) -> Evict:
    """Return `evict` with entries unused for more than `ttl_s` seconds dropped before all others.

    For a `ConversationEvictor`, these are conversations of which no entry was used in that time.
    """
    if isinstance(evict, ConversationEvictor):
        return replace(evict, ttl_s=ttl_s, now=now)

    def choose(entries: Sequence[Entry]) -> Iterator[ChunkKey]:
        expired_keys = dict.fromkeys(expired(entries, now(), ttl_s))
        yield from expired_keys
        yield from evict([entry for entry in entries if entry.key not in expired_keys])

    return choose
