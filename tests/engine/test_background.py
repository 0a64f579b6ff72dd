"""What is encoded after an answer: once each, whole, and in nobody's way."""

import threading
from dataclasses import replace

import pytest
import torch

from ragfuse import Engine, ModelError, SettingsError
from ragfuse.engine.background import EncodeJob, jobs_after
from ragfuse.hf import probe
from ragfuse.hf.model import ENCODE_STEP_TOKENS
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, LoadPlan
from ragfuse.types.prompt import Prompt, Segment
from ragfuse.types.reasons import ENCODING
from tests.tiny import CHUNKS, chunk_hits, messages


def test_of_a_missed_chunk_that_stands_in_part_the_whole_is_encoded_once():
    key = ChunkKey("model", "tokens")
    part = Segment((3,), 0, "chunk", (key,), "book", "text", rows=(1, 2), stored=(7, 3, 8))
    prompt = Prompt((part, replace(part, start=1), Segment((9,), 2)))
    job = EncodeJob("chunk", (7, 3, 8), "text", "book")
    assert list(jobs_after(LoadPlan(prompt, 0.1, "hkvd", ()))) == [job]
    read = Fetch(0, key, "memory", "raw", 1)
    assert list(jobs_after(LoadPlan(prompt, 0.1, "hkvd", (read, replace(read, segment=1))))) == []


def test_a_question_that_comes_while_documents_are_encoded_says_so_and_waits_for_a_few_tokens(
    tiny_settings,
):
    settings = tiny_settings.model_copy(update={"prefix_cache": False})
    with Engine(settings) as engine:
        gate = threading.Event()
        engine.runtime.jobs.submit(lambda: gate.wait(60))
        try:
            first = engine.answer(messages(CHUNKS[:2])).trace
            second = engine.answer(messages(CHUNKS[:2])).trace
        finally:
            gate.set()
        engine.flush()
        third = engine.answer(messages(CHUNKS[:2])).trace
    assert ENCODING not in first.summary
    assert {each.why for each in second.segments if each.kind == "chunk"} == {ENCODING}
    assert "still being encoded" in second.summary
    assert chunk_hits(third) == [True, True]
    assert third.as_dict()["summary"] == third.summary


def are_close(found, wanted, skipped=0):
    """Layers are those of the twin behind so many rows."""
    for kv, twin in zip(found, wanted, strict=True):
        torch.testing.assert_close(kv.keys, twin.keys[:, skipped:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kv.values, twin.values[:, skipped:], rtol=1e-4, atol=1e-5)


def test_a_long_run_is_encoded_in_steps_to_what_it_is_at_once(engine):
    model, context = engine.model, engine.tokens(CHUNKS[1])
    ids = (engine.tokens(CHUNKS[0]) * 8)[: 3 * ENCODE_STEP_TOKENS + 5]
    before = model._context_kv(tuple(context))
    whole = probe.plain_kv(
        model.model,
        torch.tensor([[*ids]], device=model.device),
        torch.arange(len(ids), device=model.device),
        before,
    )
    are_close(model.encode(ids, context).layers, whole, len(context))


@pytest.mark.parametrize("given", [{"settings": "smollm2-135m-reader"}, {"store": "/somewhere"}])
def test_an_engine_that_is_given_names_in_the_wrong_places_says_where_they_go(given):
    with pytest.raises((ModelError, SettingsError), match=r"Settings\(store="):
        Engine(**given)
