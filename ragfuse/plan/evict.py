"""Whom to drop: when a tier is full, and when an entry is too old. Decisions only: nothing here reads a clock, a file
or a tensor. What time it is, and who waits in which order, is told.

A policy is an order (`Rank`): of what is kept, who goes first. `Evictor` sorts what a tier shows it by that order;
`EvictionOrder` in `eviction_order.py` holds the same order over what changes one by one. Windows and prefetching are in
`look_ahead.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Literal

from ragfuse.errors import SettingsError
from ragfuse.plan.eviction_item import EvictionItem, Rank
from ragfuse.plan.ranks import rank_named
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

Evict = Callable[[Sequence[Entry]], Iterable[ChunkKey]]
"""Yields keys to drop, the first first."""

ConversationOf = Callable[[ChunkKey], Hashable]
"""The name of the conversation that a key's KV belongs to; None: it stands for itself."""

PolicyName = Literal["lru", "fifo", "look-ahead"]


def _itself(key: ChunkKey) -> Hashable:
    return None


def _at_once(key: ChunkKey) -> float:
    return 0.0


def _no_clock() -> float:
    return 0.0


def items(
    entries: Iterable[Entry], conversation_of: ConversationOf = _itself, arrived: Callable[[ChunkKey], float] = _at_once
) -> list[EvictionItem]:
    """Entries grouped into what goes as one, in the order in which each is met first; none with a pinned entry."""
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
            min(arrived(entry.key) for entry in found),
        )
        for name, found in groups.items()
        if not any(entry.pinned for entry in found)
    ]


def ranked(found: Iterable[EvictionItem], rank: Rank, places: Mapping[Hashable, float]) -> Iterator[EvictionItem]:
    """Items in the order in which they go, equals in the order given; sorted only as far as it is read."""
    heap = [(rank(item, places.get(item.name)), index, item) for index, item in enumerate(found)]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[2]


def nobody_waits() -> Mapping[Hashable, float]:
    """The places where there is no queue."""
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Evictor:
    """A policy by name, as an `Evict`: whole conversations one after the other, each key of one before the next's.

    places: asked anew each time, where in the queue each conversation's first job waits
    (`ragfuse.plan.look_ahead.places`). arrived: when a key came, which fifo needs. ttl_s and now: conversations unused
    for longer go before all others.
    `together` tells a tier which keys go as one, and to show it all entries at once: what was used longest ago says
    nothing of what came first or is used next.
    """

    rank: Rank
    conversation_of: ConversationOf = _itself
    places: Callable[[], Mapping[Hashable, float]] = nobody_waits
    arrived: Callable[[ChunkKey], float] = _at_once
    ttl_s: float = inf
    now: Callable[[], float] = _no_clock

    def __call__(self, entries: Sequence[Entry]) -> Iterator[ChunkKey]:
        """Keys to drop, the first first; none of a conversation of which something is pinned."""
        now_s = self.now()
        old: list[EvictionItem] = []
        kept: list[EvictionItem] = []
        for item in items(entries, self.conversation_of, self.arrived):
            (old if now_s - item.last_used > self.ttl_s else kept).append(item)
        for item in (*old, *ranked(kept, self.rank, self.places())):
            yield from item.keys

    def together(self, one: ChunkKey, other: ChunkKey) -> bool:
        """Whether these are of one conversation, so that both go or none."""
        name = self.conversation_of(one)
        return name is not None and name == self.conversation_of(other)


def evictor(
    name: PolicyName | str,
    conversation_of: ConversationOf | None = None,
    places: Callable[[], Mapping[Hashable, float]] | None = None,
    arrived: Callable[[ChunkKey], float] | None = None,
) -> Evict:
    """The policy of that name over what a tier shows: `lru`, `fifo` (needs `arrived`) or `look-ahead` (`places`).

    SettingsError for another name, and where what it needs is not given. Entries alone, without conversations: `lru`.
    """
    rank = rank_named(name)
    if name == "fifo" and arrived is None:
        raise SettingsError("The policy fifo wants to know when keys came: give it `arrived`.")
    if name == "look-ahead" and places is None:
        raise SettingsError("The policy look-ahead wants to know who waits: give it `places`.")
    if name == "lru" and conversation_of is None:
        return lru
    return Evictor(rank, conversation_of or _itself, places or nobody_waits, arrived or _at_once)


def lru(entries: Iterable[Entry]) -> Iterator[ChunkKey]:
    """Keys to drop in this order, least recently used first; pinned ones never, equals in the order given."""
    evictable = (entry for entry in entries if not entry.pinned)
    for entry in sorted(evictable, key=lambda entry: entry.last_used):
        yield entry.key


def expired(entries: Iterable[Entry], now_s: float, ttl_s: float) -> Iterator[ChunkKey]:
    """Keys of those unused for longer than `ttl_s` at `now_s` (since the epoch), in the order given; no pinned ones."""
    for entry in entries:
        if not entry.pinned and now_s - entry.last_used > ttl_s:
            yield entry.key


def expired_first(evict: Evict, ttl_s: float, now: Callable[[], float]) -> Evict:
    """`evict`, but entries that are too old go before all others, whatever it thinks of them.

    Where conversations go whole, those of which nothing was used since.
    """
    if isinstance(evict, Evictor):
        return replace(evict, ttl_s=ttl_s, now=now)

    def choose(entries: Sequence[Entry]) -> Iterator[ChunkKey]:
        old = dict.fromkeys(expired(entries, now(), ttl_s))
        yield from old
        yield from evict([entry for entry in entries if entry.key not in old])

    return choose
