"""A bounded mapping: what was used last stays, whoever asks."""

from ragfuse.process.lru import LRU


def test_it_drops_the_value_that_was_used_longest_ago():
    lru = LRU[str, int](2)
    assert [lru.add(key, at) for at, key in enumerate("ab")] == [0, 1]
    assert lru.get("a") == 0
    lru.add("c", 2)
    assert ("a" in lru, lru.get("b"), lru.get("c")) == (True, None, 2)
    lru.discard(["a", "nobody's"])
    assert ("a" in lru, "c" in lru) == (False, True)
