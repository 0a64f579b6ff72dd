"""The loading controller: no less than keeps answers close, as much more as loading hides, full
prefill if faster.
"""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ragfuse.plan.controller import MEASURED, TIE, Timed, widest
from tests.kits.plan import machine, plan, prompt_of, with_cost

LEAST = MEASURED[1]
SPEEDS = st.floats(-10.5, -5.5).map(lambda power: 10.0**power)
TIERS = st.lists(st.sampled_from(["memory", "disk", "far", "farther", ""]), min_size=1, max_size=6)


def planned(tiers, byte_s=1e-8, policy="auto", ratio=None, deadline_s=None, **others):
    prompt, entries = prompt_of(tiers)
    return plan(
        prompt, entries, policy, ratio, deadline_s=deadline_s, costs=machine(far=byte_s, **others)
    )


def timed_at(found, ratio, byte_s):
    return Timed(machine(far=byte_s), replace(found, ratio=LEAST)).at(ratio).ttft_s


def test_in_memory_the_ratio_is_the_least_that_is_safe():
    found = planned(["memory"] * 6)
    assert (found.ratio, found.policy, found.forecast.bound) == (LEAST, "hkvd", "floor")


def test_a_slow_tier_hides_more_and_a_step_beyond_would_be_late():
    found = planned(["far"] * 6, 2e-8, policy="hkvd")
    assert found.ratio > LEAST + 0.1
    assert found.forecast.bound == "loading"
    base = timed_at(found, LEAST, 2e-8)
    assert found.forecast.ttft_s <= base * (1 + TIE)
    assert timed_at(found, found.ratio + 0.02, 2e-8) > base + TIE * min(base, found.forecast.load_s)


@given(
    TIERS,
    SPEEDS,
    SPEEDS,
    st.sampled_from(["auto", "hkvd", "lego", "query", "lego-8", "none", "full"]),
)
def test_the_ratio_is_never_below_the_least_and_never_above_one(tiers, far, farther, policy):
    assert LEAST <= planned(tiers, far, policy, farther=farther).ratio <= 1


@given(SPEEDS, SPEEDS, st.sampled_from(["hkvd", "lego", "query"]), st.integers(1, 6))
def test_slower_loading_in_the_same_steps_hides_no_less(one, other, policy, n_chunks):
    def chosen(byte_s):
        prompt, entries = prompt_of(["far"] * n_chunks)
        timed = Timed(machine(far=byte_s), plan(prompt, entries, policy))
        ratio = widest(timed)[0]
        return ratio, {timed.layers_a_read, timed.at(ratio).layers_a_read}

    (ratio, steps), (slower_ratio, slower_steps) = map(chosen, sorted((one, other)))
    assume(len(steps | slower_steps) == 1)  # in other steps the model may wait less, and less hides
    assert ratio <= slower_ratio + 0.011


@given(TIERS, SPEEDS, SPEEDS)
def test_every_segment_is_a_hit_or_a_miss_with_a_reason(tiers, far, farther):
    found = planned(tiers, far, farther=farther)
    hits, misses = [fetch.segment for fetch in found.fetches], dict(found.misses)
    assert sorted([*hits, *misses]) == list(range(len(tiers)))
    assert all(misses.values())
    assert {fetch.segment for fetch in found.unread} <= set(misses)
    assert {fetch.segment for fetch in found.unread} | set(hits) == {
        at for at, tier in enumerate(tiers) if tier
    }
    assert found.forecast is not None


@given(TIERS, SPEEDS, SPEEDS)
def test_full_prefill_is_planned_only_where_fusing_is_no_sooner(tiers, far, farther):
    found, fused = (
        planned(tiers, far, *asked, farther=farther) for asked in (("auto",), ("hkvd", LEAST))
    )
    assume(fused.fetches)
    if found.fallback_reason:
        assert found.forecast.full_s <= fused.forecast.ttft_s
        assert f"{found.forecast.full_s:.3f} s" in found.fallback_reason
        assert dict(found.misses).keys() == set(range(len(tiers)))
        assert (found.fetches, found.forecast.ttft_s) == ((), found.forecast.full_s)
    else:
        assert found.forecast.ttft_s <= found.forecast.full_s * (1 + TIE)
        assert found.forecast.ttft_s <= fused.forecast.ttft_s * (1 + TIE) + 1e-12


def test_a_short_prompt_that_fusing_would_hold_up_is_prefilled():
    prompt, entries = prompt_of(["memory"], n_tokens=30)
    assert plan(prompt, entries, costs=with_cost(machine(), fixed_s=0.1)).fallback_reason
    assert not plan(prompt, entries, costs=with_cost(machine(), fixed_s=0.001)).fallback_reason


def test_a_chunk_that_is_slower_to_load_than_to_compute_is_computed():
    found = planned(["disk", "disk", "disk", "far", "disk"], 1e-7)
    assert [fetch.segment for fetch in found.fetches] == [0, 1, 2, 4]
    assert found.misses == ((3, "slower to load than to compute"),)
    assert [(fetch.segment, fetch.tier) for fetch in found.unread] == [(3, "far")]
    assert (
        found.forecast.ttft_s
        < planned(["disk", "disk", "disk", "far", "disk"], 1e-7, "hkvd").forecast.ttft_s
    )


def test_what_was_asked_for_is_done_and_foretold():
    found = planned(["far"] * 3, 1e-6, "hkvd", 0.3)
    assert (found.policy, found.ratio, len(found.fetches)) == ("hkvd", 0.3, 3)
    assert (found.fallback_reason, found.forecast.bound) == ("", "asked")
    assert found.forecast.ttft_s > found.forecast.full_s
    assert planned(["far"] * 3, 1e-6, ratio=0.3).ratio == 0.3


def test_a_deadline_bounds_the_ratio_and_never_below_the_least():
    free = planned(["far"] * 6, 2e-8, "hkvd")
    least_s = timed_at(free, LEAST, 2e-8)
    between = planned(["far"] * 6, 2e-8, "hkvd", deadline_s=(least_s + free.forecast.ttft_s) / 2)
    assert LEAST <= between.ratio < free.ratio
    assert (between.forecast.bound, between.forecast.is_late) == ("deadline", False)
    late = planned(["far"] * 6, 2e-8, "hkvd", deadline_s=least_s / 2)
    assert (late.ratio, late.forecast.bound, late.forecast.is_late) == (LEAST, "deadline", True)
    assert not planned(["far"] * 6, 2e-8, "hkvd", deadline_s=60.0).forecast.is_late


def test_a_prompt_that_nothing_is_known_of_is_foretold_as_full_prefill():
    found = planned(["", ""])
    assert (found.fetches, found.forecast.ttft_s) == ((), found.forecast.full_s)
    assert found.with_full_prefill("nothing").forecast.ttft_s == found.forecast.full_s


@pytest.mark.parametrize("policy", ["lego-8", "none", "full"])
def test_a_policy_that_takes_what_it_takes_keeps_its_ratio(policy):
    assert planned(["far"] * 6, 2e-8, policy).ratio == LEAST
