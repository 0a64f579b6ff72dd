"""The circuit breaker lets no call through while its medium is down, and tries one call at
a time.
"""

import pytest

from ragfuse.store.tier import Breaker
from tests.kits.store import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker("Tier x", clock)


def fail(breaker):
    assert breaker.enter()
    breaker.failed("read", OSError("no route"))


def test_one_failure_keeps_all_calls_away_until_the_cool_down_is_over(breaker, clock):
    fail(breaker)
    for clock.now in (0.0, 5.0, 9.9):
        assert not breaker.enter()
    clock.now = 10.0
    assert breaker.enter()
    assert not breaker.enter()  # somebody else is trying
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.enter()
    assert breaker.enter()


def test_a_trial_that_fails_or_never_ends_begins_the_cool_down_anew(breaker, clock):
    fail(breaker)
    clock.now = 10.0
    fail(breaker)
    clock.now = 19.9
    assert not breaker.enter()
    clock.now = 20.0
    assert breaker.enter()
    clock.now = 30.0
    assert breaker.enter()


def test_a_call_that_began_before_the_failure_does_not_end_the_cool_down(breaker):
    assert breaker.enter()
    fail(breaker)
    breaker.succeeded()
    assert breaker.is_open
    assert not breaker.enter()
