"""The policies by name, each against what it says done the slow way: over whatever is kept, and whoever waits."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.errors import SettingsError
from ragfuse.plan.evict import evictor, expired_first, items, lru, ranked
from ragfuse.plan.eviction_item import EvictionItem
from ragfuse.plan.eviction_order import EvictionOrder
from ragfuse.plan.look_ahead import exempt, places
from ragfuse.plan.ranks import RANKS
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


def entry(conversation: int, turn: int, last_used: float, nbytes: int = 8, *, pinned: bool = False) -> Entry:
    key = ChunkKey("m", f"c{conversation}", f"t{turn}")
    return Entry(key, "memory", 4, 2, {"raw": nbytes}, last_used, pinned=pinned)


def conversation_of(key: ChunkKey) -> str:
    return key.tokens


def arrived(key: ChunkKey) -> float:
    """By name alone: the later the name, the earlier it came."""
    return -float(key.tokens[1:]) - float(key.context[1:]) / 100


STEPS = st.sampled_from(["put", "drop", "wait", "leave", "pop"])
SOME = st.lists(
    st.builds(
        entry,
        st.integers(0, 6),
        st.integers(0, 9),
        st.integers(0, 5).map(float),
        pinned=st.sampled_from([False] * 9 + [True]),
    ),
    max_size=24,
    unique_by=lambda found: found.key,
)
QUEUES = st.lists(st.integers(0, 8).map(lambda n: f"c{n}"), max_size=10)


def slow_order(name: str, entries: list[Entry], queue: list[str]) -> list[str]:
    """Conversations as the policy names them, by looking for the next one again and again."""
    assert name in ("lru", "fifo", "look-ahead"), f"add the order of {name} here"
    left = {}
    for each in entries:
        left.setdefault(conversation_of(each.key), []).append(each)
    left = {name: found for name, found in left.items() if not any(each.pinned for each in found)}
    order = []
    while left:
        if name == "fifo":
            chosen = min(left, key=lambda c: min(arrived(each.key) for each in left[c]))
        else:
            free = [c for c in left if c not in queue] if name == "look-ahead" else list(left)
            if free:
                chosen = min(free, key=lambda c: max(each.last_used for each in left[c]))
            else:
                chosen = max(left, key=queue.index)
        order.append(chosen)
        del left[chosen]
    return order


@pytest.mark.parametrize("name", RANKS)
@given(entries=SOME, queue=QUEUES)
def test_each_policy_drops_in_the_order_that_looking_again_and_again_gives(name, entries, queue):
    choose = evictor(name, conversation_of, lambda: places(queue), arrived)
    dropped = [conversation_of(key) for key in choose(entries)]
    assert [name for name, _ in groupby(dropped)] == slow_order(name, entries, queue)


@pytest.mark.parametrize("name", RANKS)
@given(entries=SOME, queue=QUEUES)
def test_a_conversation_goes_whole_and_one_with_something_pinned_stays_whole(name, entries, queue):
    dropped = list(evictor(name, conversation_of, lambda: places(queue), arrived)(entries))
    kept = {conversation_of(each.key) for each in entries if each.pinned}
    assert sorted(map(str, dropped)) == sorted(str(e.key) for e in entries if conversation_of(e.key) not in kept)
    assert len(list(groupby(dropped, conversation_of))) == len(set(map(conversation_of, dropped)))


@given(entries=SOME, queue=QUEUES, window=st.integers(0, 8))
def test_who_waits_in_the_window_goes_after_all_others_and_its_tail_first(entries, queue, window):
    waiting = places(queue, window)
    found = list(ranked(items(entries, conversation_of), RANKS["look-ahead"], waiting))
    spared = [item for item in found if exempt(item, waiting)]
    assert found[len(found) - len(spared) :] == spared
    assert [item.name for item in spared] == sorted((item.name for item in spared), key=queue.index, reverse=True)
    assert all(item.name in queue[:window] for item in spared)


@pytest.mark.parametrize("name", RANKS)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 5), st.integers(0, 9)), max_size=60))
def test_a_ranking_is_the_sorted_order_after_every_change(name, steps):
    kept, waiting, ranking = {}, {}, EvictionOrder(RANKS[name])
    for number, (step, who, much) in enumerate(steps):
        if step == "put":
            kept[who] = EvictionItem(who, (), much, float(number), float(-number))
            ranking.put(kept[who])
        elif step == "drop":
            assert ranking.drop(who) == kept.pop(who, None)
        elif step == "wait":
            waiting[who] = float(number)
            ranking.wait(who, float(number))
        elif step == "leave":
            waiting.pop(who, None)
            ranking.wait(who, None)
        elif (gone := next(ranking.pops(), None)) is not None:
            assert gone == next(ranked(kept.values(), RANKS[name], waiting))
            del kept[gone.name]
        assert ranking.nbytes == sum(item.nbytes for item in kept.values())
        assert (len(ranking), ranking.first()) == (len(kept), next(ranked(kept.values(), RANKS[name], waiting), None))
    assert list(ranking.pops()) == list(ranked(kept.values(), RANKS[name], waiting))


def test_a_ranking_that_changes_much_stays_small():
    ranking = EvictionOrder(RANKS["lru"])
    for number in range(10_000):
        ranking.put(EvictionItem(number % 3, (), 1, float(number)))
    assert len(ranking._heap) < 100


def test_a_conversation_of_which_something_was_used_is_not_too_old():
    entries = [entry(1, 0, 10.0), entry(1, 1, 95.0), entry(2, 0, 20.0), entry(2, 1, 30.0), entry(3, 0, 90.0)]
    choose = expired_first(evictor("look-ahead", conversation_of, lambda: {"c2": 0.0}), 60.0, lambda: 100.0)
    assert [conversation_of(key) for key in choose(entries)] == ["c2", "c2", "c3", "c1", "c1"]


def test_lru_without_conversations_is_the_plain_one():
    assert evictor("lru") is lru


def test_entries_of_no_conversation_go_one_by_one():
    def lone(key: ChunkKey) -> str | None:
        return key.tokens if key.tokens == "c1" else None

    entries = [entry(1, 0, 1.0), entry(2, 0, 2.0), entry(2, 1, 0.0), entry(1, 1, 3.0)]
    choose = evictor("lru", lone)
    assert [(key.tokens, key.context) for key in choose(entries)] == [
        ("c2", "t1"),
        ("c2", "t0"),
        ("c1", "t0"),
        ("c1", "t1"),
    ]
    assert choose.together(entries[0].key, entries[3].key)
    assert not choose.together(entries[1].key, entries[2].key)


@pytest.mark.parametrize(
    ("name", "wanted"), [("mru", "lru, fifo, look-ahead"), ("fifo", "arrived"), ("look-ahead", "places")]
)
def test_a_policy_that_is_unknown_or_lacks_what_it_needs_is_refused(name, wanted):
    with pytest.raises(SettingsError, match=wanted):
        evictor(name)
