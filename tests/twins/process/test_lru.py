"""A bounded mapping: what was used last stays, whoever asks."""

from ragfuse.process.shared import LRU


def test_an_lru_drops_the_least_recently_used_value():
    lru = LRU[str, int](2)
    assert [lru.add(key, at) for at, key in enumerate("ab")] == [0, 1]
    assert lru.get("a") == 0
    lru.add("c", 2)
    assert ("a" in lru, lru.get("b"), lru.get("c")) == (True, None, 2)
    lru.discard(["a", "nobody's"])
    assert ("a" in lru, "c" in lru) == (False, True)
