"""The trip of an ingest: texts in, KV behind the prompt's own beginning in the store, texts in the book."""

import pytest

from ragfuse import Engine, InputError
from ragfuse.core import amid, token_digest
from tests.tiny import CHUNKS, ingest, messages

SOURCED = [(text, f"book-{number}") for number, text in enumerate(CHUNKS)]


def test_every_chunk_is_kept_behind_the_prefix_and_amid_other_text_and_the_prefix_alone(engine):
    ingest(engine)
    prefix = engine.prefix(messages())
    behind = token_digest(prefix)
    contexts = behind, amid(behind)
    wanted = {engine.key(engine.tokens(text), context) for text in CHUNKS for context in contexts}
    wanted.add(engine.key(prefix))
    assert {entry.key for entry in engine.store.entries()} == wanted
    assert {entry.tier for entry in engine.store.entries()} == {"memory", "disk"}


def test_every_text_is_in_the_book_with_its_source(engine):
    ingest(engine)
    assert {(known.text, known.source) for known in engine.book.texts(engine.digest)} == set(SOURCED)


def test_what_the_store_has_is_not_encoded_again(engine):
    ingest(engine)
    again = engine.ingest(SOURCED, engine.prefix(messages()))
    assert (again.chunks, again.encoded, again.tokens, again.nbytes) == (6, 0, 0, 0)


def test_white_space_around_a_text_makes_no_other_chunk(engine):
    engine.ingest([(CHUNKS[0], "a")])
    assert engine.ingest([(f"\n  {CHUNKS[0]} \n", "a")]).encoded == 0


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
    assert done.nbytes == 2 * done.tokens * engine.model.nbytes_per_token
    assert done.nbytes == engine.store.stats().nbytes["memory"]


def test_without_other_text_a_chunk_has_one_entry(tiny_settings):
    with Engine(tiny_settings.model_copy(update={"amid_tokens": 0})) as engine:
        done = engine.ingest([(text, "one book") for text in CHUNKS])
        assert done.nbytes == done.tokens * engine.model.nbytes_per_token
        assert {entry.key.context for entry in engine.store.entries()} == {""}
        trace = engine.answer(messages()).trace
        assert {segment.encoded for segment in trace.segments if segment.hit} == {"alone"}
        assert trace.policy == "hkvd"
        for _ in range(2):
            engine.answer(messages())
            engine.flush()
        best = {segment.keys[0] for segment in engine.prompt(messages()).segments if segment.keys}
        assert set(engine.store.lookup(best)) == best  # nothing is left to be encoded again and again


def test_what_was_interrupted_between_the_two_entries_is_completed(engine):
    engine.ingest([(text, "one book") for text in CHUNKS])
    for text in CHUNKS[1:3]:
        engine.store.delete(engine.key(engine.tokens(text), amid("")))
    engine.store.delete(engine.key(engine.tokens(CHUNKS[4])))
    again = engine.ingest([(text, "one book") for text in CHUNKS])
    assert again.encoded == 3
    assert len({entry.key for entry in engine.store.entries()}) == 12


def test_a_text_too_short_to_be_reused_is_not_kept(engine):
    assert engine.ingest([("tiny", "a"), ("", "b"), ("   ", "c")]).encoded == 0
    assert engine.store.entries() == []


def test_a_text_longer_than_the_model_is_refused_by_its_name(engine):
    with pytest.raises(InputError, match=r"'the long one'.*at most 4,096 tokens.*found 5,000"):
        engine.ingest([("x" * 5000, "the long one")])


def test_a_store_without_room_keeps_nothing_and_says_so(tiny_settings):
    with Engine(tiny_settings.model_copy(update={"memory_bytes": 1000, "disk_bytes": 1000})) as engine:
        assert engine.ingest(SOURCED).encoded == 0
        assert engine.store.stats().dropped_writes == 24


def test_another_salt_has_its_own_entries_and_texts(tiny_settings, engine):
    ingest(engine)
    with Engine(tiny_settings.model_copy(update={"salt": "other"})) as other:
        assert other.store.lookup([other.key(other.tokens(text)) for text in CHUNKS]) == {}
        assert list(other.book.texts(other.digest)) == []
        assert all(text not in other.known for text in CHUNKS)


def test_only_the_first_chunk_of_a_prompt_comes_from_right_behind_the_prefix(engine):
    engine.ingest([(text, "one book") for text in CHUNKS], engine.prefix(messages()))
    for order in (CHUNKS, CHUNKS[::-1]):
        first, *others = [s for s in engine.answer(messages(order)).trace.segments if s.kind == "chunk"]
        assert (first.encoded, first.exact) == ("prefix", True)
        assert {(segment.encoded, segment.exact) for segment in others} == {("amid", False)}


def test_equal_chunks_of_a_document_are_encoded_once(engine):
    texts = [f"Page {number}. {CHUNKS[number % 6]}" for number in range(30)]
    done = engine.ingest([(text, "one long book") for text in [*texts, texts[3]]], engine.prefix(messages()))
    assert (done.chunks, done.encoded) == (31, 30)
    prefix = token_digest(engine.prefix(messages()))
    for text in texts:
        for context in (prefix, amid(prefix)):
            entry = engine.store.lookup([engine.key(engine.tokens(text), context)])
            assert [found.n_tokens for found in entry.values()] == [len(engine.tokens(text))]


def test_a_chunk_that_leaves_no_room_for_other_text_has_one_entry(engine):
    text = "x" * 4000
    assert engine.ingest([(text, "a"), (CHUNKS[0], "a")]).encoded == 2
    assert not engine.store.lookup([engine.key(engine.tokens(text), amid(""))])
    assert engine.store.lookup([engine.key(engine.tokens(text)), engine.key(engine.tokens(CHUNKS[0]), amid(""))])


def test_a_prefix_longer_than_the_model_is_refused(engine):
    with pytest.raises(InputError, match="What stands before the first chunk does not fit"):
        engine.ingest(SOURCED, engine.tokens("x" * 5000))


def test_what_was_ingested_without_the_prompts_beginning_is_encoded_behind_it_once_that_is_known(engine):
    engine.learn(engine.profile.calibrated(True, "lego", 0.06))
    engine.ingest([(text, "one book") for text in CHUNKS])
    policies = []
    for _ in range(3):
        policies.append(engine.answer(messages()).trace.policy)
        engine.flush()
    trace = engine.answer(messages()).trace
    assert (policies, trace.policy) == (["hkvd", "hkvd", "lego"], "lego")
    assert [segment.encoded for segment in trace.segments] == ["alone", "prefix", *["amid"] * 5]
    assert trace.segments[1].exact


def test_under_another_beginning_chunks_come_amid_other_text_all_the_same(engine):
    engine.ingest([(text, "one book") for text in CHUNKS])
    trace = engine.answer(messages(head="Some other, longer beginning of a prompt.\n\n")).trace
    assert [segment.encoded for segment in trace.segments if segment.hit] == ["alone", *["amid"] * 5]
