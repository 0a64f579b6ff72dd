"""What things take: layer by layer as in all, policies by what they need first, reading behind fusing to the tick."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.fuse.select import POLICIES, cost_of
from ragfuse.plan.estimate import (
    HELD_UP_S,
    Blend,
    Estimate,
    fused_s,
    layers_s,
    pipelined_s,
)
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch
from ragfuse.types.policy_cost import schedule, watched_layers
from tests.plan.kit import COST, LAYERS, machine

BLENDS = st.builds(
    Blend,
    cost=st.sampled_from([policy.cost for policy in POLICIES]),
    tokens=st.just(2000),
    forced=st.integers(1, 400),
    candidate_rows=st.integers(0, 1500),
    ratio=st.floats(0, 1),
)
TICKS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def fetch(tier: str, nbytes: int = 1_200_000, segment: int = 0) -> Fetch:
    return Fetch(segment, ChunkKey("model", str(segment)), tier, "raw", nbytes)


def simulated(loads: list[int], computes: list[int], waiting: int) -> int:
    """The same tick by tick: a thread loads and waits for room, somebody takes and computes."""
    queue: list[int] = []
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


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_policy_s_kind_is_what_it_needs_first(policy):
    wanted = "attention" if policy.wants == "attention" else "all rows of a layer" if policy.check_layer else "nothing"
    assert policy.cost.needs == wanted


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if hasattr(policy, "gradual")], ids=lambda p: p.name)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_rows_follow_the_schedule_of_the_policy(policy, ratio):
    rows = Blend(policy.cost, 1000, 10, 100, ratio).rows(LAYERS)
    first = policy.check_layer
    shares = [schedule(ratio, layer, first, LAYERS, policy.gradual) for layer in range(first, LAYERS)]
    assert rows == pytest.approx([110.0] * first + [10 + 100 * share for share in shares])


@given(BLENDS, st.integers(2, 40))
def test_layers_take_together_what_the_whole_takes(blend, n_layers):
    look, passes = layers_s(COST, blend, n_layers)
    assert len(passes) == n_layers
    assert sum(look) + sum(passes) == pytest.approx(fused_s(COST, blend, n_layers))


@given(BLENDS, st.floats(0, 1))
def test_more_rows_take_no_less(blend, ratio):
    less, more = sorted((replace(blend, ratio=blend.ratio or 0.01), replace(blend, ratio=ratio or 0.01)), key=_ratio)
    assert fused_s(COST, less, LAYERS) <= fused_s(COST, more, LAYERS) + 1e-12


def _ratio(blend: Blend) -> float:
    return blend.ratio


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


@given(BLENDS, st.sampled_from([1e-10, 1e-8, 1e-6]))
def test_the_first_token_waits_for_the_longer_one_and_never_for_more_than_both(blend, byte_s):
    times, fetches = Estimate(machine(far=byte_s)), [fetch("far", segment=at) for at in range(3)]
    load_s, compute_s = sum(times.steps_s(fetches)), times.fused_s(blend)
    assert max(load_s, compute_s) <= times.ttft_s(blend, fetches) * (1 + 1e-9)
    held_up_s = HELD_UP_S * len(fetches) * len(times.steps_s(fetches))
    assert times.ttft_s(blend, fetches) <= (load_s + compute_s + held_up_s) * (1 + 1e-9)


def test_memory_is_read_where_it_is_used_and_a_slow_tier_behind_fusing():
    times, blend = Estimate(machine()), Blend(cost_of("lego"), 1000, 50, 500, 0.2)
    inline, ahead = [fetch("memory")], [fetch("memory"), fetch("disk", 20 << 20, 1)]
    assert times.ttft_s(blend, inline) == pytest.approx(sum(times.steps_s(inline)) + times.fused_s(blend))
    assert times.ttft_s(blend, ahead) < sum(times.steps_s(ahead)) + times.fused_s(blend)


def test_a_policy_that_looks_computes_after_three_quarters_are_loaded():
    times, fetches = Estimate(machine(far=1e-6)), [fetch("far", 80 << 20)]
    static, looking = (Blend(cost_of(policy), 1000, 50, 500, 0.2) for policy in ("lego", "query"))
    _, passes = layers_s(COST, looking, LAYERS)
    load_s, watched = sum(times.steps_s(fetches)), watched_layers(LAYERS).stop
    assert times.ttft_s(looking, fetches) >= load_s * watched / LAYERS + sum(passes)
    assert times.ttft_s(static, fetches) <= times.ttft_s(looking, fetches)
    quick = Estimate(machine(far=1e-12))
    assert quick.ttft_s(looking, fetches) >= times.fused_s(looking)


def test_an_entry_takes_what_reads_and_bytes_take():
    times = Estimate(machine(far=1e-6))
    assert times.load_s("far", 1_000_000, 12) == pytest.approx(12 * 1e-4 + 1.0)
    assert times.load_s("far", 24 << 20) == pytest.approx(7 * 1e-4 + (24 << 20) * 1e-6)
    fetches = [fetch("far", 8 << 20), fetch("disk", 24 << 20, 1)]
    both = times.load_s("far", 8 << 20, 7) + times.load_s("disk", 24 << 20, 7)
    assert sum(times.steps_s(fetches)) == pytest.approx(both)
