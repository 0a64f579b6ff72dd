"""A bounded mapping: what was used last stays, whoever asks, also in a forked child."""

import os
import threading
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.process.lru import LRU

STEPS = st.lists(st.tuples(st.sampled_from(("add", "get", "discard")), st.integers(0, 6)), max_size=60)


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


def test_looking_at_all_values_is_no_use():
    lru = LRU[str, int](2)
    lru.add("a", 1)
    lru.add("b", 2)
    lru.discard_where(lambda value: value > 5)
    lru.add("c", 3)
    assert [key in lru for key in "abc"] == [False, True, True]
    lru.discard_where(lambda value: value == 3)
    assert len(lru) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_amid_a_change_begins_empty_and_works():
    lru, held, done = LRU[str, int](4), threading.Event(), threading.Event()
    lru.add("a", 1)

    def change() -> None:
        with lru._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=change)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        os._exit(0 if lru.get("a") is None and lru.add("b", 2) == 2 and "b" in lru else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert lru.get("a") == 1
