"""What answers took corrects what was measured: soon, within bounds, and not by what
happened once.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.plan.cost import MAX_CORRECTION, MIN_PREFILL_ROWS, READINGS, Observed
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, LoadPlan
from ragfuse.types.prompt import Prompt, Segment
from tests.kits.plan import machine

SPEEDS = machine(far=1e-8, near=1e-9)


def planned(*tiers, unread=(), n_tokens=100):
    """A plan that reads from these tiers, and leaves an entry in each of the others unread."""
    fetches = [
        Fetch(at, ChunkKey("model", str(at)), tier, "raw", 4_800_000)
        for at, tier in enumerate((*tiers, *unread))
    ]
    prompt = Prompt((Segment(tuple(range(n_tokens)), 0),))
    return LoadPlan(
        prompt, 0.0, "none", tuple(fetches[: len(tiers)]), unread=tuple(fetches[len(tiers) :])
    )


def load_s(*tiers):
    return sum(SPEEDS.steps_s(planned(*tiers).fetches))


def seen(*times, tiers=("far", "far"), before=None):
    """After prompts over these tiers that took so many times as long as measured."""
    found = before or Observed(SPEEDS)
    for each in times:
        found = found.loaded(planned(*tiers), each * load_s(*tiers))
    return found


def corrections(found):
    """How many times as long as measured tiers are taken to need."""
    measured, now = SPEEDS.tiers, found.applied(12).tiers
    return {
        name: each.read_s / measured[name].read_s
        for name, each in now.items()
        if each != measured[name]
    }


@pytest.mark.parametrize("times", [10.0, 0.1])
def test_three_readings_that_agree_are_believed(times):
    assert corrections(seen(times)) == {}
    assert corrections(seen(times, times, times)) == {"far": pytest.approx(times)}
    back = seen(times, times, times, times, times, 1.0, 1.0, 1.0)
    assert corrections(back) == {}


@pytest.mark.parametrize("times", [1.0, 4.0])
@pytest.mark.parametrize("odd", [1e-9, 1e9])
def test_what_happened_once_changes_nothing(times, odd):
    assert corrections(seen(odd)) == {}
    found = seen(*[times] * 5, odd)
    for _ in range(4):
        assert found.times("far") == pytest.approx(times)
        found = seen(times, before=found)


@given(
    st.lists(st.floats(0, 1e12), max_size=12),
    st.lists(st.sampled_from(["far", "near", "memory"]), min_size=1),
)
def test_no_tier_is_corrected_beyond_the_bounds(took, tiers):
    found = Observed(SPEEDS)
    for seconds in took:
        found = found.loaded(planned(*tiers), seconds)
    for tier in found.tiers:
        assert 1 / MAX_CORRECTION <= found.times(tier) * (1 + 1e-9) <= MAX_CORRECTION * (1 + 2e-9)


def test_tiers_of_one_prompt_share_what_was_seen_as_they_share_the_time():
    both = seen(4.0, 4.0, 4.0, tiers=("far", "near"))
    # near: a tenth
    assert {tier: both.times(tier) for tier in both.tiers} == {"far": pytest.approx(4.0)}
    alike = seen(4.0, 4.0, 4.0, tiers=("far", "near", "near", "near", "near"))
    assert corrections(alike) == {"far": pytest.approx(4.0), "near": pytest.approx(4.0)}
    known = seen(8.0, 8.0, 8.0, 8.0, 8.0, tiers=("near",))
    after = known.loaded(planned("far", "near"), load_s("far") + 8 * load_s("near"))
    assert after.tiers["near"][-1] == pytest.approx(8.0, rel=0.1)
    assert after.tiers["far"][-1] == pytest.approx(1.0, rel=0.1)


def test_a_slow_tier_that_is_left_unread_is_believed_again():
    slow = seen(10.0, 10.0, 10.0, 10.0, 10.0)
    for _ in range(3):
        assert corrections(slow)
        slow = slow.loaded(planned(unread=("far", "near")), 0.0)
    assert (corrections(slow), set(slow.tiers)) == ({}, {"far"})


def test_where_nothing_was_measured_a_row_takes_the_least_of_the_last_readings():
    found = (
        Observed().computed(planned(n_tokens=100), 4, 1.0).computed(planned(n_tokens=200), 4, 3.0)
    )
    assert found.rows == (0.01, 0.015)
    assert found.applied(4).prefill_s(3) == pytest.approx(0.03)
    assert not found.applied(4).knows([])
    for _ in range(READINGS):
        found = found.computed(planned(n_tokens=100), 4, 2.0)
    assert len(found.rows) == READINGS
    assert found.applied(4).prefill_s(3) == pytest.approx(0.06)


def test_a_short_prefill_says_nothing_of_a_row():
    assert Observed(rows=(0.5,)).computed(planned(n_tokens=MIN_PREFILL_ROWS - 1), 4, 1.0).rows == (
        0.5,
    )
    assert Observed().applied(4) is None
