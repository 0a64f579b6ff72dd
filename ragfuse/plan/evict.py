"""Whom to drop when a tier is full. Decisions only: nothing here reads a clock, a file or a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ragfuse.core import ChunkKey, Entry


def lru(entries: Iterable[Entry]) -> Iterator[ChunkKey]:
    """Keys to drop in this order, least recently used first; pinned ones never, equals in the order given."""
    evictable = (entry for entry in entries if not entry.pinned)
    for entry in sorted(evictable, key=lambda entry: entry.last_used):
        yield entry.key
