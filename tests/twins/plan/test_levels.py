"""Codec levels in plans: what loses least while that hides, what comes sooner where the first token
waits for it.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.types.choices import loss
from tests.kits.plan import NBYTES_PER_TOKEN, machine, plan, prompt_of

PACKED = {"int8": 0.5, "cg1": 0.25, "cg2": 0.12, "cg3": 0.08}
DECODE = {"int8": 1e-6, "cg1": 4e-6, "cg2": 4e-6, "cg3": 4e-6}
SPEEDS = st.floats(-10.5, -5.5).map(lambda power: 10.0**power)
N = 200
RAW = N * NBYTES_PER_TOKEN


def levels_machine(**byte_s):
    return replace(machine(**byte_s), decode=DECODE, packed=PACKED)


def sizes(*levels):
    return {level: round(PACKED.get(level, 1.0) * RAW) for level in levels}


def at_levels(tiers, *levels):
    prompt, entries = prompt_of(tiers, N)
    return prompt, {key: replace(entry, sizes=sizes(*levels)) for key, entry in entries.items()}


def planned(tiers, levels, machine=None, **options):
    prompt, entries = at_levels(tiers, *levels)
    return plan(prompt, entries, costs=machine, **options)


def read(found):
    return [(fetch.tier, fetch.level) for fetch in found.fetches]


def test_raw_is_read_where_loading_hides_or_decoding_costs_more_than_it_saves():
    found = planned(["disk"] * 4, ["raw", "int8", "cg2"], machine=levels_machine())
    assert read(found) == [("disk", "raw")] * 4
    assert found.forecast is not None
    dear = replace(levels_machine(far=2e-8), decode={"cg2": 1.0})
    found = planned(["far"] * 2, ["raw", "cg2"], machine=dear, policy="hkvd")
    assert read(found) == [("far", "raw")] * 2


def test_without_timings_what_loses_least_is_read_from_where_it_was_found():
    found = planned(["memory", "far"], ["int8", "cg2"])
    assert read(found) == [("memory", "int8"), ("far", "int8")]


def test_a_slow_tier_is_read_at_a_level_that_hides():
    slow = levels_machine(far=2e-8)
    found = planned(["far"] * 4, ["raw", "int8", "cg1", "cg2", "cg3"], machine=slow, policy="hkvd")
    only_raw = planned(["far"] * 4, ["raw"], machine=slow, policy="hkvd")
    assert {level for _, level in read(found)} & {"cg1", "cg2", "cg3"}
    assert ("far", "cg3") not in read(found)
    assert found.forecast.ttft_s < 0.7 * only_raw.forecast.ttft_s


def test_a_level_whose_decoding_was_not_measured_is_foretold_by_nobody():
    unmeasured = replace(levels_machine(), decode={})
    assert planned(["disk"], ["cg2"], machine=unmeasured).forecast is None
    found = planned(["disk"] * 2, ["raw", "cg2"], machine=unmeasured)
    assert (read(found), found.forecast is None) == ([("disk", "raw")] * 2, False)


@given(
    st.lists(st.sampled_from(["memory", "disk", "far"]), min_size=1, max_size=12),
    st.lists(st.sampled_from(["raw", *PACKED]), min_size=1, unique=True).map(
        lambda each: sorted(each, key=loss)
    ),
    SPEEDS,
)
def test_levels_never_make_the_first_token_later(tiers, levels, far):
    found = planned(tiers, levels, machine=levels_machine(far=far), policy="hkvd")
    alone = planned(
        tiers, levels[:1], machine=levels_machine(far=far), policy="hkvd", ratio=found.ratio
    )
    assert {fetch.level for fetch in found.fetches} <= set(levels)
    assert found.forecast.ttft_s <= alone.forecast.ttft_s * 1.02 + 1e-9


def test_decoding_counts_as_loading():
    times, fetch = levels_machine(), planned(["disk"], ["int8"]).fetches[0]
    assert times.fetch_s(fetch) == pytest.approx(times.load_s("disk", RAW // 2) + 1e-6 * N)
    raw = replace(fetch, level="raw")
    assert sum(times.steps_s([fetch])) == pytest.approx(sum(times.steps_s([raw])) + 1e-6 * N)
