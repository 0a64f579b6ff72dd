"""Timings of this machine, as the book of a running engine's store keeps them: asked for seldom, never a hindrance."""

import pytest

from ragfuse import Engine
from ragfuse.timings import ASK_AGAIN_S, Timings
from tests.plan.kit import timings
from tests.store.kit import Clock


@pytest.fixture
def server(engine):
    """Timings over an engine's store that has run for a while, its clock, and the names it asked the book for."""
    clock, asked = Clock(1000.0), []

    def booked(use, otherwise):
        asked.append(use)
        return engine._booked(use, otherwise)

    known = Timings(engine.settings.tiers, booked, clock)
    assert known.machine(engine.model) is None
    return known, clock, asked


def test_what_another_process_measures_counts_after_a_minute(engine, tiny_settings, server):
    known, clock, asked = server
    for byte_s in (1e-9, 2e-9):
        with Engine(tiny_settings) as other:
            other.learn(timings(other, memory=0.0, disk=byte_s))
        before, asked[:] = known.machine(engine.model), []
        assert known.machine(engine.model) == before
        assert asked == []
        clock.now += ASK_AGAIN_S
        assert known.machine(engine.model).tiers["disk"].byte_s == byte_s
        assert len(asked) == 1


def test_a_book_that_says_nothing_or_cannot_be_read_takes_no_timings_away(engine, server, caplog):
    found, clock, _ = server
    found.learn(known := timings(engine, memory=0.0, disk=1e-9))
    engine.book.put(found.name(known.model, known.device, known.threads), {"version": 0})
    clock.now += ASK_AGAIN_S
    assert found.machine(engine.model) == known
    engine.book.close()
    clock.now += ASK_AGAIN_S
    assert found.machine(engine.model) == known
    assert "timings of this machine could not be read" in caplog.text
