"""A bounded mapping: what was used last stays, whoever asks."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from ragfuse.process.lru import LRU

STEPS = st.lists(
    st.tuples(st.sampled_from(("add", "get", "discard")), st.integers(0, 6)), max_size=60
)


@given(STEPS, st.integers(1, 4))
def test_it_keeps_what_an_ordered_dictionary_keeps(steps, limit):
    lru, slow = LRU[int, int](limit), OrderedDict[int, int]()
    for step, (what, key) in enumerate(steps):
        if what == "add":
            lru.add(key, step)
            slow[key] = step
            slow.move_to_end(key)
            if len(slow) > limit:
                slow.popitem(last=False)
        elif what == "get":
            assert lru.get(key) == slow.get(key)
            if key in slow:
                slow.move_to_end(key)
        else:
            lru.discard([key])
            slow.pop(key, None)
        assert len(lru) == len(slow)
        assert all(key in lru for key in slow)
