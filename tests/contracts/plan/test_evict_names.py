"""The policies by name, each against what it says done the slow way: over whatever is kept, and
whoever waits.
"""

from itertools import chain, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.plan.evict import ConversationEvictor, by_next_use, by_use, expired, lru, rank_named
from ragfuse.types.choices import EVICTION_POLICIES
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


def entry(conversation, turn, last_used, nbytes=8, *, pinned=False):
    key = ChunkKey("m", f"c{conversation}", f"t{turn}")
    return Entry(key, "memory", 4, 2, {"raw": nbytes}, last_used, pinned=pinned)


def conversation_of(key):
    return key.tokens


SOME = st.lists(
    st.builds(
        entry,
        st.integers(0, 6),
        st.integers(0, 9),
        st.integers(0, 5).map(float),
        st.integers(1, 9),
        pinned=st.sampled_from([False] * 9 + [True]),
    ),
    max_size=24,
    unique_by=lambda found: found.key,
)
QUEUES = st.lists(st.integers(0, 8).map(lambda n: f"c{n}"), max_size=10)


def places(queue):
    """The place of each conversation's first job."""
    return {name: float(queue.index(name)) for name in queue}


def slow_order(name, entries, queue):
    """Conversations as the policy names them, by looking for the next one again and again."""
    assert name in ("lru", "look-ahead"), f"add the order of {name} here"
    left = {}
    for each in entries:
        left.setdefault(conversation_of(each.key), []).append(each)
    left = {name: found for name, found in left.items() if not any(each.pinned for each in found)}
    order = []
    while left:
        free = [c for c in left if c not in queue] if name == "look-ahead" else list(left)
        if free:
            chosen = min(free, key=lambda c: max(each.last_used for each in left[c]))
        else:
            chosen = max(left, key=queue.index)
        order.append(chosen)
        del left[chosen]
    return order


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@given(entries=SOME, queue=QUEUES)
def test_each_policy_drops_in_the_order_that_looking_again_and_again_gives(name, entries, queue):
    choose = ConversationEvictor(rank_named(name), conversation_of, lambda: places(queue))
    dropped = [conversation_of(key) for key in chain.from_iterable(choose(entries))]
    assert [name for name, _ in groupby(dropped)] == slow_order(name, entries, queue)


def test_a_conversation_of_which_something_was_used_is_not_too_old():
    entries = [
        entry(1, 0, 10.0),
        entry(1, 1, 95.0),
        entry(2, 0, 20.0),
        entry(2, 1, 30.0),
        entry(3, 0, 90.0),
    ]
    choose = ConversationEvictor(
        by_next_use, conversation_of, lambda: {"c2": 0.0}, 60.0, lambda: 100.0
    )
    assert [conversation_of(key) for key in chain.from_iterable(choose(entries))] == [
        "c2",
        "c2",
        "c3",
        "c1",
        "c1",
    ]


def test_entries_of_no_conversation_go_one_by_one():
    def lone(key):
        return key.tokens if key.tokens == "c1" else None

    entries = [entry(1, 0, 1.0), entry(2, 0, 2.0), entry(2, 1, 0.0), entry(1, 1, 3.0)]
    choose = ConversationEvictor(by_use, lone)
    assert [[(key.tokens, key.context) for key in group] for group in choose(entries)] == [
        [("c2", "t1")],
        [("c2", "t0")],
        [("c1", "t0"), ("c1", "t1")],
    ]


def test_lru_drops_the_least_recently_used_first_and_nothing_pinned():
    entries = [entry(at, 0, float(at), pinned=at == 1) for at in range(3)]
    assert [[key.tokens for key in group] for group in lru(entries)] == [["c0"], ["c2"]]


def test_expired_are_those_unused_for_longer_and_nothing_pinned():
    used = [10.0, 40.0, 5.0, 39.9]
    entries = [entry(at, 0, when, pinned=when == 5) for at, when in enumerate(used)]
    assert [key.tokens for key in expired(entries, 100.0, 60.0)] == ["c0", "c3"]
    assert list(expired(entries, 100.0, 1000.0)) == []
