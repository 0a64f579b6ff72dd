"""Whom lru drops."""

from ragfuse.plan.evict import expired, expired_first, lru
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


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


def test_expired_are_those_unused_for_longer_and_never_pinned():
    entries = [entry("a", 10.0), entry("b", 40.0), entry("c", 5.0, pinned=True), entry("d", 39.9)]
    assert [key.tokens for key in expired(entries, 100.0, 60.0)] == ["a", "d"]
    assert list(expired(entries, 100.0, 1000.0)) == []


def test_what_is_too_old_goes_before_all_that_the_policy_names():
    def newest_first(entries):
        return [entry.key for entry in sorted(entries, key=lambda entry: -entry.last_used)]

    entries = [entry("a", 1.0), entry("b", 50.0), entry("c", 60.0), entry("d", 2.0, pinned=True)]
    choose = expired_first(newest_first, 30.0, lambda: 70.0)
    assert [key.tokens for key in choose(entries)] == ["a", "c", "b", "d"]
    assert [key.tokens for key in expired_first(lru, 1000.0, lambda: 70.0)(entries)] == ["a", "b", "c"]
