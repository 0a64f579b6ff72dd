"""Timings of this machine, as the book of a running engine's store keeps them."""

import pytest

from ragfuse import Ask
from ragfuse.engine.model_records import MachineTimings
from tests.kits.plan import timings
from tests.kits.tiny import messages


@pytest.fixture
def known(engine):
    """Timings over an engine's store, asked before any were taken."""
    known = MachineTimings(engine.settings.tiers, engine.catalog)
    assert known.machine(engine.model) is None
    return known


def test_a_book_that_says_nothing_or_cannot_be_read_takes_no_timings_away(engine, known, caplog):
    known.learn(taken := timings(engine, memory=0.0, disk=1e-9))
    engine.catalog.strict.put(known.name(taken.model, taken.device, taken.threads), {"version": 0})
    assert known.machine(engine.model) == taken
    engine.catalog._database._reader.close()
    assert known.machine(engine.model) == taken
    assert "book" in caplog.text
    assert "continues without it" in caplog.text


def test_where_nothing_was_measured_computing_goes_by_what_it_took(engine, known):
    plan = engine.plan(messages(), Ask(reuse=False))
    assert known.costs(engine.model) is None
    known.note(engine.model, plan, None, 2.0)
    known.note(engine.model, plan, None, 1.0)
    assert known.costs(engine.model).prefill_s(len(plan.prompt)) == pytest.approx(1.0)
