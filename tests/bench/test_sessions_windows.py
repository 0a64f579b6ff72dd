"""Windows, buffers and capacities against the paper's formulas, and the order of items against
sorting them.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragfuse_bench.sessions.eviction_order import EvictionOrder
from ragfuse_bench.sessions.windows import (
    buffer_excess,
    by_arrival,
    cache_capacity,
    eviction_window,
    prefetch_window,
    required_capacity,
)

from ragfuse.plan.evict import by_next_use, by_use
from ragfuse.plan.eviction_item import EvictionItem

GB = 10**9
STEPS = st.sampled_from(["put", "drop", "wait", "leave", "pop"])


def test_the_windows_are_the_paper_s():
    kv_bytes = 1500 * 0.78e6
    assert prefetch_window(128 * GB, kv_bytes) == 109
    assert eviction_window(128 * GB, 2000 * GB, kv_bytes) == 1818
    assert prefetch_window(100, 30) == 3
    assert eviction_window(100, 20, 30) == 4
    assert prefetch_window(29, 30) == 0 == eviction_window(0, 0, 30)
    assert prefetch_window(7, 0) == 7


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0, 1))
def test_what_is_cleared_away_leaves_the_buffer_free_and_no_more(used, capacity, share):
    excess = buffer_excess(used, capacity, share)
    assert used - excess <= int(capacity * (1 - share)) or used - excess == 0
    assert excess == 0 or used - (excess - 1) > int(capacity * (1 - share))


def test_the_capacity_rule_is_sessions_times_the_longest_of_them():
    assert cache_capacity(3600, 4096, 0.78e6) == 3600 * 4096 * 0.78e6
    assert required_capacity(0.25, 3600, 4096, 0.78e6) == math.ceil(0.25 * 3600 * 4096 * 0.78e6)
    assert required_capacity(0.5, 3, 1, 1) == 2


@pytest.mark.parametrize("rank", [by_use, by_arrival, by_next_use])
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 5), st.integers(0, 9)), max_size=60))
def test_a_ranking_is_the_sorted_order_after_every_change(rank, steps):
    kept, waiting, ranking = {}, {}, EvictionOrder(rank)

    def ranked():
        return sorted(kept.values(), key=lambda item: rank(item, waiting.get(item.name)))

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
            assert gone == ranked()[0]
            del kept[gone.name]
        assert ranking.nbytes == sum(item.nbytes for item in kept.values())
        assert (len(ranking), ranking.first()) == (len(kept), next(iter(ranked()), None))
    assert list(ranking.pops()) == ranked()
