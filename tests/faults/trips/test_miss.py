"""The trips of a miss, of an entry that is lost on the way, and of a model that is refused."""

import os
import threading

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ragfuse import Ask, Engine, Settings
from ragfuse.engine.model_records import stored_profile
from ragfuse.store import KVStore
from ragfuse.types.keys import filler_context
from ragfuse.types.plan import NOT_ENCODED
from tests.kits.tiny import CHUNKS, adds_up, chunk_hits, file_of, ingest, messages, on_disk_only


def test_a_first_question_computes_everything_and_the_next_one_hits(engine):
    first = engine.answer(messages())
    assert first.trace.fallback_reason == NOT_ENCODED
    assert chunk_hits(first.trace) == [False] * 6
    engine.flush()
    second = engine.answer(messages())
    assert chunk_hits(second.trace) == [True] * 6
    assert adds_up(first.trace)
    assert adds_up(second.trace)


def test_missing_chunks_are_computed_in_place_outside_the_budget(engine):
    ingest(engine, CHUNKS[1:5])
    trace = engine.answer(messages()).trace
    assert chunk_hits(trace) == [False, *[True] * 4, False]
    missed = [segment for segment in trace.segments if not segment.hit]
    assert [segment.why for segment in missed] == ["not in the store"] * 2
    assert trace.tokens_fresh > sum(segment.n_tokens for segment in missed)
    assert adds_up(trace)


def test_a_missing_chunk_is_encoded_after_the_answer_and_its_text_is_known(engine):
    ingest(engine, CHUNKS[:1])
    engine.answer(messages())
    engine.flush()
    trace = engine.answer(messages(CHUNKS[3:])).trace
    found = [(segment.kind, segment.encoded, segment.exact) for segment in trace.segments]
    assert found == [("prefix", "alone", True)] + [("chunk", "filler", False)] * 3
    assert set(CHUNKS) <= {known.text for known in engine.catalog.strict.texts(engine.digest)}


def test_a_beginning_that_is_new_is_not_encoded_and_its_chunks_are_once_each(engine):
    engine.answer(messages(), Ask(reuse=False))
    engine.flush()
    assert engine.store.entries() == []  # of a full prefill that was asked for
    engine.answer(messages([*CHUNKS, CHUNKS[2]]))
    engine.flush()
    wanted = {
        engine.runtime.encoder.key(engine.tokens(text), filler_context("")) for text in CHUNKS
    }
    assert {entry.key for entry in engine.store.entries()} == wanted


def struck(store: KVStore, target, layer, strike) -> threading.Event:
    """Lets something happen to a file right before one layer of a chunk is read; set once
    it has.
    """
    read, done = store.read_layers, threading.Event()

    def read_layers(key, first, count=1, tier=None, level=None):
        if key == target and layer in range(first, first + count) and not done.is_set():
            strike()
            done.set()
        return read(key, first, count, tier, level)

    store.read_layers = read_layers
    return done


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 8 :] = os.urandom(len(data) - len(data) // 8)
    with path.open("r+b") as file:
        file.write(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 8)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("strike", [flip, cut, os.unlink])
def test_an_entry_that_is_corrupted_or_deleted_in_the_middle_is_a_miss_and_the_answer_is_right(
    tiny_settings, layer, strike
):
    with on_disk_only(tiny_settings) as engine:
        ingest(engine)
        full = engine.answer(messages(), Ask(reuse=False))
        key = engine.prompt(messages()).segments[3].keys[0]
        path = file_of(engine, CHUNKS[1], key.context)
        done = struck(engine.store, key, layer, lambda: strike(path))
        answer = engine.answer(messages(), Ask(ratio=1.0))
        assert done.is_set()
        assert answer.token_ids == full.token_ids
        lost = [segment for segment in answer.trace.segments if not segment.hit]
        assert [segment.why for segment in lost] == ["the stored entry could not be read"]
        assert adds_up(answer.trace)
        engine.flush()
        assert chunk_hits(engine.answer(messages()).trace) == [True] * 6


def test_a_store_that_loses_everything_still_answers(tiny_settings):
    def unplugged(*_):
        raise RuntimeError("the cable was pulled")

    with on_disk_only(tiny_settings) as engine:
        ingest(engine)
        engine.store.read_layers = unplugged
        answer, full = engine.answer(messages()), engine.answer(messages(), Ask(reuse=False))
    assert answer.token_ids == full.token_ids
    assert answer.trace.fallback_reason == "none of this text is stored yet"


@pytest.fixture(scope="session")
def gpt2_path(tiny_path, tmp_path_factory):
    """A model whose hidden states carry the position: its KV cannot be moved."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_path)
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=2048, n_embd=32, n_layer=2, n_head=2, eos_token_id=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_refused_model_is_answered_by_its_own_full_prefill_with_the_reason(
    gpt2_path, tmp_path, prefix_cache
):
    settings = Settings(model=str(gpt2_path), dtype="float32", store=tmp_path, max_tokens=8)
    with Engine(settings.model_copy(update={"prefix_cache": prefix_cache})) as engine:
        assert engine.ingest([(CHUNKS[0], "book")]).encoded == 0
        answer = engine.answer(messages())
        ids = torch.tensor([engine.prompt(messages()).token_ids])
        wanted = engine.model.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        several = engine.batch([messages(), messages(CHUNKS[:2])])
        with engine.stream(messages()) as stream:
            said = "".join(stream)
        engine.flush()
        assert list(answer.token_ids) == wanted[0, ids.shape[1] :].tolist()
        assert several[0].token_ids == answer.token_ids
        assert said == answer.text
        assert "position" in answer.trace.fallback_reason
        assert answer.trace.tokens_fresh == answer.trace.tokens
        if not prefix_cache:
            assert engine.store.entries() == []


def test_of_a_refused_model_beginnings_are_read_where_they_stand_and_the_answer_is_its_own(
    gpt2_path, tmp_path
):
    settings = Settings(model=str(gpt2_path), dtype="float32", store=tmp_path, max_tokens=8)
    asked = [messages(question=question) for question in ("Who?", "What?")]
    with Engine(settings) as engine:
        full = [engine.answer(each, Ask(reuse=False)) for each in asked]
        assert engine.store.entries() == []
        found = [engine.answer(each) for each in asked]
        engine.flush()
        assert [each.token_ids for each in found] == [each.token_ids for each in full]
        trace = found[1].trace
        hits = [(segment.kind, segment.exact) for segment in trace.segments if segment.hit]
        assert hits == [("prefix", True)]
        assert trace.tokens_prefix == trace.tokens_reused > len(engine.prefix(messages()))
        entries = engine.store.entries()
        assert {entry.tier for entry in entries} == {"memory"}
        assert "filler" not in {entry.key.encoded for entry in entries}


def test_the_refusal_is_remembered_and_the_next_process_does_not_probe(gpt2_path, tmp_path):
    settings = Settings(model=str(gpt2_path), dtype="float32", store=tmp_path)
    with Engine(settings) as engine:
        refusal = engine.model.profile.refusal
    with Engine(settings) as again:
        assert stored_profile(again.catalog, engine.model.fingerprint).refusal == refusal != ""
