"""The circuit breaker counts what it lets through, and tries one call at a time."""

import itertools
import logging
import threading

import pytest

from ragfuse.store.breaker import Breaker, BreakerOpen
from tests.store.kit import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker("Tier x", cool_down_s=10, clock=clock)


def fail(breaker, error=None):
    with pytest.raises(type(error or OSError())), breaker.guard():
        raise error or OSError("no route")


def test_one_failure_keeps_all_calls_away_until_the_cool_down_is_over(breaker, clock):
    fail(breaker)
    for clock.now in (0.0, 5.0, 9.9):
        with pytest.raises(BreakerOpen), breaker.guard():
            raise AssertionError("let through")
    assert breaker.attempts == 1
    clock.now = 10.0
    with breaker.guard():
        pass
    assert not breaker.is_open
    with breaker.guard():
        pass
    assert breaker.attempts == 3


def test_a_trial_that_fails_begins_the_cool_down_anew(breaker, clock):
    fail(breaker)
    clock.now = 10.0
    fail(breaker)
    clock.now = 19.9
    with pytest.raises(BreakerOpen), breaker.guard():
        raise AssertionError("let through")
    clock.now = 20.0
    with breaker.guard():
        pass
    assert not breaker.is_open


def test_only_one_thread_makes_the_trial(breaker, clock):
    fail(breaker)
    clock.now = 10.0
    inside, done, refused = threading.Event(), threading.Event(), []

    def trial():
        with breaker.guard():
            inside.set()
            done.wait(30)

    def other():
        with pytest.raises(BreakerOpen), breaker.guard():
            raise AssertionError("let through")
        refused.append(1)

    first = threading.Thread(target=trial)
    first.start()
    assert inside.wait(30)
    others = [threading.Thread(target=other) for _ in range(4)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    done.set()
    first.join()
    assert len(refused) == 4
    assert (breaker.attempts, breaker.is_open) == (2, False)


def test_an_exception_that_is_no_trouble_is_an_answer(breaker, clock):
    fail(breaker, ValueError("no such thing"))
    assert not breaker.is_open
    fail(breaker)
    clock.now = 10.0
    fail(breaker, ValueError("no such thing"))
    assert not breaker.is_open


def test_ctrl_c_in_a_trial_leaves_the_next_one_possible(breaker, clock):
    fail(breaker)
    clock.now = 10.0
    fail(breaker, KeyboardInterrupt())
    assert breaker.is_open
    with breaker.guard():
        pass
    assert not breaker.is_open


def test_a_call_that_was_under_way_when_another_failed_changes_nothing(breaker, clock):
    with breaker.guard():
        fail(breaker)
    assert breaker.is_open  # its answer may be older than the failure
    clock.now = 10.0
    with breaker.guard():
        pass
    late = breaker.guard()
    late.__enter__()
    fail(breaker)
    clock.now = 15.0
    assert not late.__exit__(OSError, OSError("late"), None)
    clock.now = 20.0
    with breaker.guard():
        pass
    assert not breaker.is_open


def test_the_log_hears_of_the_first_failure_and_of_the_recovery_once_each(breaker, clock, caplog):
    caplog.set_level(logging.INFO, "ragfuse.store")
    fail(breaker)
    for clock.now in itertools.accumulate([10.0] * 5):
        fail(breaker)
    clock.now += 10
    with breaker.guard():
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "Tier x" in caplog.records[0].message
    assert "no route" in caplog.records[0].message


def test_what_asks_nobody_may_only_ask_whether_it_would_be_let_through(breaker, clock):
    breaker.check()
    fail(breaker)
    with pytest.raises(BreakerOpen):
        breaker.check()
    clock.now = 10.0
    breaker.check()
    assert breaker.is_open
    assert breaker.attempts == 1
    with breaker.guard(), pytest.raises(BreakerOpen):
        breaker.check()  # somebody else is trying
    breaker.check()
    assert not breaker.is_open
