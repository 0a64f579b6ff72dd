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

from ragfuse.plan.evict import EvictionItem, by_next_use, by_use

GB = 10**9


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
@given(st.lists(st.tuples(st.sampled_from(["put", "drop", "wait", "leave"]), st.integers(0, 5))))
def test_a_ranking_is_the_sorted_order_after_every_change(rank, steps):
    kept, waiting, ranking = {}, {}, EvictionOrder(rank)
    for number, (step, who) in enumerate(steps):
        if step == "put":
            kept[who] = EvictionItem(who, (), number, float(number), float(-number))
            ranking.put(kept[who])
        elif step == "drop":
            assert ranking.drop(who) == kept.pop(who, None)
        else:
            waiting[who] = float(number) if step == "wait" else None
            ranking.wait(who, waiting[who])
        wanted = sorted(kept.values(), key=lambda item: rank(item, waiting.get(item.name)))
        assert ranking.first() == next(iter(wanted), None)
        assert ranking.nbytes == sum(item.nbytes for item in wanted)
    assert list(ranking.pops()) == (wanted if steps else [])
