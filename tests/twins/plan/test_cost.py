"""What things cost: more rows no less, reading behind fusing to the tick, layers read a few at a
time.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.fuse.select import POLICIES, cost_of
from ragfuse.plan.cost import (
    HELD_UP_S,
    STEP_NBYTES,
    Blend,
    layers_a_read,
    pipelined_s,
    spans,
)
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, schedule, watched_layers
from tests.kits.plan import LAYERS, machine

BLENDS = st.builds(
    Blend,
    cost=st.sampled_from([policy.cost for policy in POLICIES]),
    tokens=st.just(2000),
    forced=st.integers(1, 400),
    candidate_rows=st.integers(0, 1500),
    ratio=st.floats(0, 1),
)
TICKS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def fetch(tier, nbytes=1_200_000, segment=0):
    return Fetch(segment, ChunkKey("model", str(segment)), tier, "raw", nbytes)


def simulated(loads, computes, waiting):
    """The same tick by tick: a thread loads and waits for room, somebody takes and computes."""
    queue = []
    loading, rest, taken, busy, now = 0, loads[0], 0, 0, 0
    while True:
        moved = True
        while moved:
            moved = False
            if loading < len(loads) and rest == 0 and len(queue) < waiting:
                queue.append(loading)
                loading, moved = loading + 1, True
                rest = loads[loading] if loading < len(loads) else 0
            if busy == 0 and queue:
                busy, taken, moved = computes[queue.pop(0)], taken + 1, True
        if taken == len(computes) and busy == 0:
            return now
        now, rest, busy = now + 1, max(0, rest - 1), max(0, busy - 1)


@given(TICKS, st.integers(1, 4))
def test_loading_behind_computing_ends_when_a_simulation_says_so(steps, waiting):
    loads, computes = [load for load, _ in steps], [compute for _, compute in steps]
    assert pipelined_s(loads, computes, waiting) == simulated(loads, computes, waiting)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_rows_are_the_mean_of_the_schedule_of_the_policy(policy, ratio):
    first = policy.check_layer
    shares = [
        schedule(ratio, layer, first, LAYERS) if first else ratio for layer in range(first, LAYERS)
    ]
    by_layer = [110.0] * first + [10 + 100 * share for share in shares]
    assert Blend(policy.cost, 1000, 10, 100, ratio).rows(LAYERS) == pytest.approx(
        sum(by_layer) / LAYERS
    )


@given(BLENDS, st.floats(0.01, 1), st.floats(0.01, 1))
def test_more_rows_take_no_less(blend, one, other):
    less, more = (replace(blend, ratio=ratio) for ratio in sorted((one, other)))
    assert machine().fused_s(less) <= machine().fused_s(more) + 1e-12


def test_the_share_is_what_a_policy_takes_whatever_was_asked():
    assert cost_of("hkvd").share_of(0.2, [100, 50]) == 0.2
    assert cost_of("full").share_of(0.2, [100]) == 1.0
    assert (
        cost_of("none").share_of(0.2, [100])
        == cost_of("full").share_of(0.0, [100])
        == cost_of("hkvd").share_of(0.2, [])
        == 0.0
    )
    assert cost_of("lego-16").share_of(0.2, [100, 60, 8]) == 40 / 168


@given(BLENDS, st.sampled_from(["memory", "disk", "far"]))
def test_the_first_token_waits_for_the_longer_one_and_never_for_more_than_both(blend, tier):
    """What is read where it is used, as from memory, takes both."""
    costs, fetches = machine(far=1e-8), [fetch(tier, segment=at) for at in range(3)]
    most = costs.counts(fetches)[0]
    load_s, compute_s = sum(costs.steps_s(fetches)), costs.fused_s(blend)
    least = load_s + compute_s if tier == "memory" else max(load_s, compute_s)
    assert least <= costs.ttft_s(blend, fetches, most) * (1 + 1e-9)
    held_up_s = HELD_UP_S * len(fetches) * len(costs.steps_s(fetches))
    assert costs.ttft_s(blend, fetches, most) <= (load_s + compute_s + held_up_s) * (1 + 1e-9)


def test_a_policy_that_looks_computes_after_three_quarters_are_loaded():
    costs, fetches = machine(far=1e-6), [fetch("far", 80 << 20)]
    static, looking = (Blend(cost_of(policy), 1000, 50, 500, 0.2) for policy in ("lego", "query"))
    load_s, watched = sum(costs.steps_s(fetches)), watched_layers(LAYERS).stop
    second_s, most = costs.fused_s(static), costs.counts(fetches)[0]
    assert costs.ttft_s(looking, fetches, most) >= load_s * watched / LAYERS + second_s
    assert costs.ttft_s(static, fetches, most) <= costs.ttft_s(looking, fetches, most)
    assert machine(far=1e-12).ttft_s(looking, fetches, most) >= costs.fused_s(looking) > second_s


def test_an_entry_takes_what_reads_and_bytes_take():
    costs = machine(far=1e-6)
    assert costs.load_s("far", 1_000_000) == pytest.approx(4 * 1e-4 + 1.0)
    assert costs.load_s("far", 24 << 20) == pytest.approx(7 * 1e-4 + (24 << 20) * 1e-6)
    fetches = [fetch("far", 24 << 20), fetch("disk", 24 << 20, 1)]
    both = costs.load_s("far", 24 << 20) + costs.load_s("disk", 24 << 20)
    assert sum(costs.steps_s(fetches)) == pytest.approx(both)


# layers at a time


@given(st.integers(0, 200), st.integers(1, 200))
def test_reads_take_every_layer_once_and_grow_from_one_to_as_many_as_allowed(n_layers, most):
    found = spans(n_layers, most)
    assert [layer for first, end in found for layer in range(first, end)] == list(range(n_layers))
    sizes = [end - first for first, end in found]
    assert all(0 < size <= most for size in sizes)
    assert sizes[:1] in ([], [1])
    assert all(one <= two <= 2 * one for one, two in pairwise(sizes[:-1]))


@given(st.integers(0, 1 << 40), st.integers(1, 100))
def test_as_many_layers_are_read_together_as_fit_and_at_least_one(nbytes, n_layers):
    most = layers_a_read(nbytes, n_layers)
    assert 1 <= most <= n_layers
    assert most == 1 or most * nbytes <= STEP_NBYTES * n_layers
    assert most == n_layers or (most + 1) * nbytes > STEP_NBYTES * n_layers
