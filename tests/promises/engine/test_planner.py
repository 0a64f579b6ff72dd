"""An engine plans by this machine's timings where there are any, in this process and in
later ones.
"""

from dataclasses import replace

import pytest

from ragfuse import Ask, Engine
from tests.kits.plan import timings
from tests.kits.store import leave_only_in
from tests.kits.tiny import CHUNKS, ingest, messages, on_disk_only


def test_without_timings_or_with_those_of_other_threads_nothing_is_predicted(engine):
    ingest(engine)
    other = timings(engine, memory=0.0, disk=1e-9)
    engine.timings.learn(replace(other, threads=other.threads + 1))
    assert engine.plan(messages()).forecast is None
    trace = engine.answer(messages()).trace
    assert (trace.predicted_ttft_s, trace.predicted_load_s) == (None, None)
    assert 0 < trace.prefill_s <= trace.ttft_s


def test_timings_are_kept_for_later_processes_and_stand_in_the_trace(tiny_settings):
    with Engine(tiny_settings) as engine:
        ingest(engine)
        engine.timings.learn(timings(engine, memory=0.0, disk=1e-9))
        planned = engine.plan(messages())
    with Engine(tiny_settings) as later:
        trace = later.answer(messages()).trace
        assert later.plan(messages()).forecast is not None
    assert planned.forecast is not None
    assert trace.predicted_ttft_s > 0
    assert trace.predicted_load_s > 0


def test_where_nothing_is_found_tiers_that_do_not_answer_are_named(tiny_settings):
    pytest.importorskip("redis", reason="the package redis is not installed: pip install redis")
    with Engine(tiny_settings.model_copy(update={"tiers": ("redis://127.0.0.1:1/0",)})) as engine:
        found = engine.plan(messages())
    assert "redis not answering" in found.fallback_reason


def test_chunks_that_load_too_slowly_are_computed_and_not_encoded_again(tiny_settings):
    with Engine(tiny_settings) as engine:
        ingest(engine)
    with on_disk_only(tiny_settings) as engine:
        expected = engine.answer(messages(), Ask(reuse=False)).text
        engine.timings.learn(timings(engine, disk=1.0))
        kept = {entry.key for entry in engine.store.entries()}
        answer = engine.answer(messages())
        engine.flush()
        assert {entry.key for entry in engine.store.entries()} == kept
        forecast = engine.plan(messages()).forecast
    assert answer.text == expected
    assert answer.trace.fallback_reason.startswith("full prefill ")
    assert answer.trace.predicted_ttft_s == forecast.full_s


def test_a_tier_that_is_slower_than_measured_is_planned_as_it_is_after_three_answers(tiny_settings):
    with Engine(tiny_settings) as engine:
        ingest(engine)
    ask = Ask(policy="hkvd", ratio=0.2, max_tokens=1)
    with on_disk_only(tiny_settings) as engine:
        engine.timings.learn(timings(engine, disk=1e-15))
        wrong = engine.plan(messages(), ask).forecast
        for _ in range(3):
            engine.answer(messages(), ask)
        assert engine.plan(messages(), ask).forecast.load_s > 5 * wrong.load_s
        engine.timings.learn(timings(engine, disk=1e-15))
        assert engine.plan(messages(), ask).forecast.load_s == wrong.load_s


@pytest.fixture
def bucket(tiny_settings, tmp_path):
    """Settings of an engine whose chunks, and one that nobody uses, all lie in an object tier
    behind the disk alone.
    """
    settings = tiny_settings.model_copy(update={"tiers": (f"file://{tmp_path}/bucket",)})
    with Engine(settings) as engine:
        ingest(engine)
        engine.ingest([(f"{CHUNKS[0]} And nobody asks.", "unused")])
        engine.flush()
        leave_only_in(engine.store, {entry.key for entry in engine.store.entries()}, "objects")
    return settings


def test_chunks_that_were_read_come_from_objects_to_disk_in_the_background(bucket):
    quickly = Ask(policy="hkvd", ratio=0.2, max_tokens=1)
    with on_disk_only(bucket) as engine:
        assert {fetch.tier for fetch in engine.plan(messages(), quickly).fetches} == {"objects"}
        engine.answer(messages(), quickly)
        engine.flush()
        assert {fetch.tier for fetch in engine.plan(messages(), quickly).fetches} == {"disk"}
        assert 0 < len(engine.store.tier("disk").list()) < len(engine.store.tier("objects").list())


@pytest.mark.parametrize(
    ("placement", "homes"), [("cheapest", {"objects"}), ("all", {"disk", "objects"})]
)
def test_a_new_chunk_goes_to_the_cheapest_tier_that_is_fast_enough_or_to_all(
    tiny_settings, tmp_path, placement, homes
):
    further = {"tiers": (f"file://{tmp_path}/bucket",), "placement": placement}
    with Engine(tiny_settings.model_copy(update=further)) as engine:
        engine.timings.learn(timings(engine, memory=0.0, disk=1e-12, objects=1e-12))
        ingest(engine)
        entries = engine.store.entries()
        assert {entry.tier for entry in entries} - {"memory"} == homes
