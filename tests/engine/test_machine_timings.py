"""Timings of this machine, as the book of a running engine's store keeps them: asked for seldom,
never a hindrance.
"""

import pytest

from ragfuse import Ask, Engine
from ragfuse.engine.machine_timings import TIMINGS_RECHECK_S, MachineTimings
from ragfuse.store.catalog import Catalog
from tests.plan.kit import timings
from tests.store.kit import Clock
from tests.tiny import messages


@pytest.fixture
def server(engine):
    """Timings over an engine's store that has run for a while, its clock, and the names it asked
    the book for.
    """
    clock, asked = Clock(1000.0), []

    class Counting(Catalog):
        def tried(self, query):
            asked.append(query)
            return super().tried(query)

    known = MachineTimings(engine.settings.tiers, Counting(engine.catalog.file), clock)
    assert known.machine(engine.model) is None
    return known, clock, asked


def test_what_another_process_measures_counts_after_a_minute(engine, tiny_settings, server):
    known, clock, asked = server
    for byte_s in (1e-9, 2e-9):
        with Engine(tiny_settings) as other:
            other.timings.learn(timings(other, memory=0.0, disk=byte_s))
        before, asked[:] = known.machine(engine.model), []
        assert known.machine(engine.model) == before
        assert asked == []
        clock.now += TIMINGS_RECHECK_S
        assert known.machine(engine.model).tiers["disk"].byte_s == byte_s
        assert len(asked) == 1


def test_a_book_that_says_nothing_or_cannot_be_read_takes_no_timings_away(engine, server, caplog):
    found, clock, _ = server
    found.learn(known := timings(engine, memory=0.0, disk=1e-9))
    engine.catalog.file.put(found.name(known.model, known.device, known.threads), {"version": 0})
    clock.now += TIMINGS_RECHECK_S
    assert found.machine(engine.model) == known
    engine.catalog.file._database.close()
    clock.now += TIMINGS_RECHECK_S
    assert found.machine(engine.model) == known
    assert "book" in caplog.text
    assert "goes on without it" in caplog.text


def test_where_nothing_was_measured_computing_goes_by_what_it_took(engine, server):
    known, _, _ = server
    plan = engine.plan(messages(), Ask(reuse=False))
    assert known.costs(engine.model) is None
    known.note(engine.model, plan, None, 2.0)
    known.note(engine.model, plan, None, 1.0)
    assert known.costs(engine.model).prefill_s(len(plan.prompt)) == pytest.approx(1.0)
