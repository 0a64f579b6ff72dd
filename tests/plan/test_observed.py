"""What answers took corrects what was measured: soon, within bounds, and not by what happened once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.plan.estimate import Estimate
from ragfuse.plan.observed import (
    MAX_CORRECTION,
    MIN_LOAD_S,
    MIN_PREFILL_ROWS,
    READINGS,
    Seen,
    by_rows,
    corrected,
    factor,
    factors,
    forgotten_after,
    rows_after,
    seen_after,
)
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch
from tests.plan.kit import LoadingController, machine, prompt_of

SPEEDS = machine(far=1e-8, near=1e-9)


def fetches(*tiers: str) -> list[Fetch]:
    return [Fetch(at, ChunkKey("model", str(at)), tier, "raw", 4_800_000) for at, tier in enumerate(tiers)]


def load_s(*tiers: str) -> float:
    return sum(Estimate(SPEEDS).steps_s(fetches(*tiers), 4))


def seen(*times: float, tiers: tuple[str, ...] = ("far", "far"), before: Seen | None = None) -> Seen:
    """After prompts over these tiers that took so many times as long as measured."""
    found = before or {}
    for each in times:
        found = seen_after(found, SPEEDS, fetches(*tiers), 4, each * load_s(*tiers))
    return found


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_three_readings_that_agree_are_believed(times):
    assert factors(seen(times)) == {}
    assert factors(seen(times, times, times)) == {"far": pytest.approx(times)}
    back = seen(times, times, times, times, times, 1.0, 1.0, 1.0)
    assert factors(back) == {}


@pytest.mark.parametrize("times", [1.0, 4.0])
@pytest.mark.parametrize("odd", [1e-9, 1e9])
def test_what_happened_once_changes_nothing(times, odd):
    found = seen(odd)
    assert factors(found) == {}
    found = seen(*[times] * 5, odd)
    for _ in range(4):
        assert factor(found["far"]) == pytest.approx(times)
        found = seen(times, before=found)


@given(st.lists(st.floats(0, 1e12), max_size=12), st.lists(st.sampled_from(["far", "near", "memory"]), min_size=1))
def test_no_tier_is_corrected_beyond_the_bounds(took, tiers):
    found: Seen = {}
    for seconds in took:
        found = seen_after(found, SPEEDS, fetches(*tiers), 4, seconds)
    assert all(
        1 / MAX_CORRECTION <= factor(readings) * (1 + 1e-9) <= MAX_CORRECTION * (1 + 2e-9)
        for readings in found.values()
    )
    plan = LoadingController(SPEEDS, corrections=factors(found)).plan(*prompt_of(["far", "near", "memory"]))
    assert math.isfinite(plan.forecast.ttft_s)


@pytest.mark.parametrize("took", [math.nan, math.inf, -1.0, 0.0, MIN_LOAD_S / 2])
def test_what_is_no_reading_is_not_counted(took):
    assert seen_after({}, SPEEDS, fetches("memory"), 4, took) == {}
    assert seen_after({}, SPEEDS, [], 0, took) == {}
    assert seen_after({}, SPEEDS, fetches("elsewhere"), 0, took) == {}
    if not math.isfinite(took):
        assert seen_after({}, SPEEDS, fetches("far"), 4, took) == {}


def test_tiers_of_one_prompt_share_what_was_seen_as_they_share_the_time():
    both = seen(4.0, 4.0, 4.0, tiers=("far", "near"))
    assert {tier: factor(readings) for tier, readings in both.items()} == {"far": pytest.approx(4.0)}  # near: a tenth
    alike = seen(4.0, 4.0, 4.0, tiers=("far", "near", "near", "near", "near"))
    assert factors(alike) == {"far": pytest.approx(4.0), "near": pytest.approx(4.0)}
    known = seen(8.0, 8.0, 8.0, 8.0, 8.0, tiers=("near",))
    took = load_s("far") + 8 * load_s("near")
    after = seen_after(known, SPEEDS, fetches("far", "near"), 4, took)
    assert after["near"][-1] == pytest.approx(8.0, rel=0.1)
    assert after["far"][-1] == pytest.approx(1.0, rel=0.1)


def test_a_slow_tier_that_is_left_unread_is_believed_again():
    slow = seen(10.0, 10.0, 10.0, 10.0, 10.0)
    for _ in range(3):
        assert factors(slow)
        slow = forgotten_after(slow, ["far", "near"])
    assert (factors(slow), set(slow)) == ({}, {"far"})


def test_a_corrected_machine_loads_and_plans_accordingly():
    slower = corrected(SPEEDS, {"far": 10.0, "gone": 3.0})
    assert Estimate(slower).load_s("far", 10**6) == pytest.approx(10 * Estimate(SPEEDS).load_s("far", 10**6))
    assert slower.tiers["disk"] == SPEEDS.tiers["disk"]
    prompt, entries = prompt_of(["disk", "far", "far"])
    found = LoadingController(SPEEDS, corrections={"far": 10.0, "near": 2.0}).plan(prompt, entries, "hkvd", 0.2)
    assert found.forecast.corrections == (("far", 10.0),)
    expected = LoadingController(slower).plan(prompt, entries, "hkvd", 0.2).forecast
    assert (found.forecast.load_s, found.forecast.ttft_s) == (expected.load_s, expected.ttft_s)


def test_a_row_takes_the_least_of_the_last_readings():
    readings = rows_after(rows_after((), 100, 1.0), 200, 3.0)
    assert readings == (0.01, 0.015)
    assert by_rows(readings, 4).prefill_s(3) == pytest.approx(0.03)
    for _ in range(READINGS):
        readings = rows_after(readings, 100, 2.0)
    assert len(readings) == READINGS
    assert by_rows(readings, 4).prefill_s(3) == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(MIN_PREFILL_ROWS - 1, 1.0), (100, 0.0), (100, math.inf), (100, math.nan)]
)
def test_a_prefill_that_says_nothing_of_a_row_is_not_counted(rows, seconds):
    assert rows_after((0.5,), rows, seconds) == (0.5,)
