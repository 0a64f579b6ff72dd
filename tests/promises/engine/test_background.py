"""What is encoded after an answer: once each, whole, and in nobody's way."""

import threading

import pytest
import torch

from ragfuse import Engine, ModelError, SettingsError
from ragfuse.engine.remember import missed
from ragfuse.hf import probe
from ragfuse.hf.model import ENCODE_STEP_TOKENS
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import ENCODING, Fetch, LoadPlan
from ragfuse.types.prompt import Prompt, Segment
from tests.kits.tiny import CHUNKS, chunk_hits, messages

KEY = ChunkKey("model", "tokens")


def after(prompt, *hits):
    """What is encoded after a prompt of which these segments were read."""
    fetches = tuple(
        Fetch(index, prompt.segments[index].keys[0], "memory", "raw", 1) for index in hits
    )
    return list(missed(LoadPlan(prompt, 0.1, "hkvd", fetches)))


def chunk(number, start, **given):
    """One token as a chunk with a key of its own."""
    key = ChunkKey("model", f"tokens-{number}")
    return Segment(
        (3 + number,), start, "chunk", (key,), f"book-{number}", f"text-{number}", **given
    )


def test_chunks_that_were_missed_are_encoded_whole_and_once_and_the_prompt_s_beginning_is_not():
    prompt = Prompt(
        (
            Segment((1, 2), 0, "prefix", (KEY,)),
            *(chunk(i, 2 + i) for i in range(3)),
            Segment((9,), 5),
        )
    )
    chunks = list(prompt.segments[1:4])
    assert after(prompt, 0, 1, 2, 3) == after(prompt, 1, 2, 3) == []
    assert after(prompt, 0, 2) == [chunks[0], chunks[2]]
    assert after(prompt) == chunks
    twice = Prompt((chunk(0, 0), chunk(1, 1), chunk(0, 2), Segment((9,), 3)))
    assert after(twice) == list(twice.segments[:2])
    assert after(twice, 0) == [twice.segments[1]]
    in_part = Prompt((chunk(0, 0, rows=(1, 2), stored=(7, 3, 8)), Segment((9,), 1)))
    (whole,) = after(in_part)
    assert (whole.tokens, whole.text, whole.source) == ((7, 3, 8), "text-0", "book-0")


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
    before = model._context_kv(tuple(context), None)
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
