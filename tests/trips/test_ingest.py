"""The trip of an ingest: texts in, KV behind the prompt's own beginning in the store, texts in the book."""

import pytest

from ragfuse import Engine, InputError
from ragfuse.core import token_digest
from tests.tiny import CHUNKS, ingest, messages

SOURCED = [(text, f"book-{number}") for number, text in enumerate(CHUNKS)]


def test_every_chunk_is_kept_behind_the_prefix_and_the_prefix_alone(engine):
    ingest(engine)
    prefix = engine.prefix(messages())
    context = token_digest(prefix)
    wanted = {engine.key(engine.tokens(text), context) for text in CHUNKS} | {engine.key(prefix)}
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
    assert done.nbytes == done.tokens * engine.model.nbytes_per_token
    assert done.nbytes == engine.store.stats().nbytes["memory"]


def test_a_text_too_short_to_be_reused_is_not_kept(engine):
    assert engine.ingest([("tiny", "a"), ("", "b"), ("   ", "c")]).encoded == 0
    assert engine.store.entries() == []


def test_a_text_longer_than_the_model_is_refused_by_its_name(engine):
    with pytest.raises(InputError, match=r"'the long one'.*at most 4,096 tokens.*found 5,000"):
        engine.ingest([("x" * 5000, "the long one")])


def test_a_store_without_room_keeps_nothing_and_says_so(tiny_settings):
    with Engine(tiny_settings.model_copy(update={"memory_bytes": 1000, "disk_bytes": 1000})) as engine:
        assert engine.ingest(SOURCED).encoded == 0
        assert engine.store.stats().dropped_writes == 12


def test_another_salt_has_its_own_entries_and_texts(tiny_settings, engine):
    ingest(engine)
    with Engine(tiny_settings.model_copy(update={"salt": "other"})) as other:
        assert other.store.lookup([other.key(other.tokens(text)) for text in CHUNKS]) == {}
        assert list(other.book.texts(other.digest)) == []
        assert all(text not in other.known for text in CHUNKS)
