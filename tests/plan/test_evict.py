"""Whom lru drops."""

from ragfuse.plan.evict import expired, lru
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


def entry(name: str, last_used: float, *, pinned: bool = False) -> Entry:
    return Entry(ChunkKey("m", name), "memory", 4, 2, {"raw": 8}, last_used, pinned=pinned)


def test_lru_yields_one_by_one_in_the_order_of_use_and_never_pinned_ones():
    entries = [entry("a", 1.0), entry("p", 1.5, pinned=True), entry("b", 2.0)]
    assert [[key.tokens for key in group] for group in lru(entries)] == [["a"], ["b"]]


def test_expired_are_those_unused_for_longer_and_never_pinned():
    entries = [entry("a", 10.0), entry("b", 40.0), entry("c", 5.0, pinned=True), entry("d", 39.9)]
    assert [key.tokens for key in expired(entries, 100.0, 60.0)] == ["a", "d"]
    assert list(expired(entries, 100.0, 1000.0)) == []
