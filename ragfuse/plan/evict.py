"""Whom to drop: when a tier is full, and when an entry is too old. Decisions only: nothing here reads a clock, a file
or a tensor. What time it is, is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ragfuse.core import ChunkKey, Entry

Evict = Callable[[Sequence[Entry]], Iterable[ChunkKey]]
"""Yields keys to drop, the first first."""


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
    """`evict`, but entries that are too old go before all others, whatever it thinks of them."""

    def choose(entries: Sequence[Entry]) -> Iterator[ChunkKey]:
        old = dict.fromkeys(expired(entries, now(), ttl_s))
        yield from old
        yield from evict([entry for entry in entries if entry.key not in old])

    return choose
