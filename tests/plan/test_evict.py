"""Whom lru drops."""

from ragfuse.core import ChunkKey, Entry
from ragfuse.plan.evict import lru


def entry(name: str, last_used: float, *, pinned: bool = False) -> Entry:
    return Entry(ChunkKey("m", name), "memory", 4, 2, {"raw": 8}, last_used, pinned=pinned)


def dropped(*entries: Entry) -> list[str]:
    return [key.tokens for key in lru(entries)]


def test_lru_yields_the_least_recently_used_first():
    assert dropped(entry("b", 2.0), entry("c", 3.0), entry("a", 1.0)) == ["a", "b", "c"]


def test_lru_never_yields_a_pinned_entry():
    assert dropped(entry("a", 1.0, pinned=True), entry("b", 2.0)) == ["b"]


def test_lru_keeps_the_given_order_of_equals():
    assert dropped(entry("z", 1.0), entry("a", 1.0)) == ["z", "a"]


def test_lru_of_nothing_is_nothing():
    assert dropped() == []
