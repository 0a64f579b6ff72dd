"""The trip of an ingest: texts in, KV behind filler text in the store, texts in the book."""

import pytest
import torch

from ragfuse import Engine
from ragfuse.engine.runtime import GAP
from ragfuse.text import filler_text
from ragfuse.types.keys import filler_context
from tests.kits.tiny import CHUNKS, messages

SOURCED = [(text, f"book-{number}") for number, text in enumerate(CHUNKS)]


def keys(engine):
    """Of all chunks, as they are encoded behind filler text."""
    return [engine.runtime.encoder.key(engine.tokens(text), filler_context("")) for text in CHUNKS]


def kept(engine):
    return {entry.key for entry in engine.store.entries()}


def test_every_chunk_is_kept_once_amid_other_text_and_the_prefix_alone_and_its_text_is_in_the_book(
    engine,
):
    prefix = engine.prefix(messages())
    done = engine.ingest([*SOURCED, (f"\n  {CHUNKS[3]} \n", "book-3")], prefix)
    assert (done.chunks, done.encoded) == (7, 6)
    assert kept(engine) == {*keys(engine), engine.runtime.encoder.key(prefix)}
    assert {entry.tier for entry in engine.store.entries()} == {"memory", "disk"}
    texts = engine.catalog.strict.texts(engine.digest)
    assert {(known.text, known.source) for known in texts} == set(SOURCED)
    again = engine.ingest(SOURCED, prefix)
    assert (again.chunks, again.encoded, again.tokens, again.nbytes) == (6, 0, 0, 0)


def test_an_interrupted_ingest_goes_on_where_it_stopped(engine):
    def stop_after_two(done):
        if done.chunks == 2:
            raise KeyboardInterrupt

    prefix = engine.prefix(messages())
    with pytest.raises(KeyboardInterrupt):
        engine.ingest(SOURCED, prefix, stop_after_two)
    assert engine.ingest(SOURCED, prefix).encoded == 4


def test_numbers_add_up_and_progress_sees_every_chunk(engine):
    seen = []
    done = engine.ingest(SOURCED, progress=seen.append)
    assert [each.chunks for each in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1] == done
    assert done.tokens == sum(len(engine.tokens(text)) for text in CHUNKS)
    assert done.nbytes == done.tokens * engine.model.nbytes_per_token
    assert done.nbytes == engine.store.tier("memory").nbytes


def test_without_other_text_a_chunk_is_encoded_alone(tiny_settings):
    with Engine(tiny_settings.model_copy(update={"filler_tokens": 0})) as engine:
        done = engine.ingest(SOURCED)
        assert done.nbytes == done.tokens * engine.model.nbytes_per_token
        assert {entry.key.context for entry in engine.store.entries()} == {""}
        trace = engine.answer(messages()).trace
        assert {segment.encoded for segment in trace.segments if segment.hit} == {"alone"}
        assert trace.policy == "hkvd"
        for _ in range(2):
            engine.answer(messages())
            engine.flush()
        segments = engine.prompt(messages()).segments
        # nothing is left to be encoded again and again
        assert kept(engine) == {each.keys[0] for each in segments if each.kind == "chunk"}


def test_a_text_too_short_to_be_reused_is_not_kept(engine):
    assert engine.ingest([("tiny", "a"), ("", "b"), ("   ", "c")]).encoded == 0
    assert engine.store.entries() == []


def test_a_store_without_room_keeps_nothing_and_says_so(tiny_settings):
    with Engine(
        tiny_settings.model_copy(update={"memory_bytes": 1000, "disk_bytes": 1000})
    ) as engine:
        assert engine.ingest(SOURCED).encoded == 0
        assert sum(tier.counts["refused"] for tier in engine.store.tiers) == 12


def test_every_chunk_of_a_prompt_comes_from_amid_other_text_also_the_first_one_and_the_prefix_is_exact(
    engine,
):
    engine.ingest(SOURCED, engine.prefix(messages()))
    headed = messages(head="Some other, longer beginning of a prompt.\n\n")
    (*_, chunk) = engine.answer(headed).trace.segments
    assert (chunk.kind, chunk.encoded) == ("chunk", "filler")
    for order in (CHUNKS, CHUNKS[::-1]):
        prefix, *chunks = engine.answer(messages(order)).trace.segments
        assert (prefix.kind, prefix.encoded, prefix.exact) == ("prefix", "alone", True)
        assert [(s.kind, s.encoded, s.exact) for s in chunks] == [("chunk", "filler", False)] * 6


@pytest.mark.parametrize(
    ("n_tokens", "other"), [(4096, 0), (4095, 1), (4000, 96), (3840, 256), (40, 256)]
)
def test_a_chunk_is_encoded_behind_as_much_other_text_as_the_model_has_room_for(
    engine, monkeypatch, n_tokens, other
):
    behind, encode = [], engine.model.encode_with_filler
    monkeypatch.setattr(
        engine.model,
        "encode_with_filler",
        lambda ids, before: behind.append(before) or encode(ids, before),
    )
    text = "x" * n_tokens
    assert engine.ingest([(text, "a")]).encoded == 1
    others = engine.tokens(filler_text() + GAP)
    assert [list(before) for before in behind] == [others[len(others) - other :]]
    assert engine.store.lookup(
        [engine.runtime.encoder.key(engine.tokens(text), filler_context(""))]
    )


def test_a_chunk_has_the_same_kv_whether_it_was_ingested_or_met_in_a_prompt(
    engine, tiny_settings, tmp_path
):
    engine.ingest(SOURCED, engine.tokens("A beginning that no prompt has at all."))
    with Engine(tiny_settings.model_copy(update={"store": tmp_path / "elsewhere"})) as other:
        other.answer(messages())
        other.flush()
        for key in keys(engine):
            layers = [each.store.read_layers(key, 0, 3) for each in (engine, other)]
            for mine, theirs in zip(*layers, strict=True):
                assert torch.equal(mine.keys, theirs.keys)
                assert torch.equal(mine.values, theirs.values)
