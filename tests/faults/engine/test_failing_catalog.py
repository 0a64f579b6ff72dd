"""A store whose book cannot be read or written: every question is answered all the same, and what
the book does not take is remembered by the process, counted, told once and named in the trace.
"""

import sqlite3
from contextlib import closing, contextmanager, suppress
from functools import partial
from unittest.mock import Mock

import pytest

from ragfuse import Engine, InputError, StoreError
from ragfuse.store import Catalog
from tests.kits.sessions import QUESTIONS, talk
from tests.kits.tiny import CHUNKS, chunk_hits, known_texts, messages

PML = (
    '<schema name="trip"><module name="a">The keeper counted forty ships in one'
    " night.</module></schema>"
)
PROMPT = '<prompt schema="trip"><a/>Who counted them?</prompt>'


@contextmanager
def broken(book, calls=("query", "write"), error="disk I/O error"):
    """A book whose file refuses these calls; one that cannot be written can be read, as on a full disk."""
    with pytest.MonkeyPatch.context() as patch:
        for call in calls:
            patch.setattr(book._database, call, Mock(side_effect=StoreError(error)))
        yield


unwritable = partial(broken, calls=("write",), error="database or disk is full")


@contextmanager
def locked(path):
    """A book that another process holds for itself."""
    with closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def mended(engine):
    """The book is tried again at once."""
    engine.catalog._breaker.is_open = False


@pytest.mark.parametrize("fault", [broken, unwritable])
def test_a_session_goes_on_in_memory_while_the_book_fails_and_the_trace_says_so(
    engine, fault, caplog
):
    (first,) = talk(engine, QUESTIONS[:1])
    with fault(engine.catalog.strict):
        answers = [first, *talk(engine, QUESTIONS[1:3])]
        _, session = engine.sessions.get(engine.digest, "one")
    said = [message.text for message in session.messages]
    assert said[::2] == list(QUESTIONS[:3])
    assert said[1::2] == [answer.text for answer in answers]
    reused = [answer.trace.history_reused for answer in answers]
    assert 0 == reused[0] < reused[1] < reused[2]
    assert first.trace.unsaved == ()
    for answer in answers[1:]:
        (said,) = answer.trace.unsaved
        assert str(engine.catalog.strict.path) in said
    assert sum("continues without it" in record.message for record in caplog.records) == 1
    assert answers[-1].trace.as_dict()["unsaved"] == list(answers[-1].trace.unsaved)
    assert engine.catalog.failures > 0


def test_turns_that_the_book_did_not_take_are_written_with_the_next_one(engine, tiny_settings):
    talk(engine, QUESTIONS[:1])
    with unwritable(engine.catalog.strict):
        talk(engine, QUESTIONS[1:2])
    assert len(Catalog(tiny_settings.store).strict.session(engine.digest, "one")[2]["turns"]) == 1
    mended(engine)
    (last,) = talk(engine, QUESTIONS[2:3])
    assert last.trace.unsaved == ()
    with Engine(tiny_settings) as other:
        assert len(other.sessions.show("one").turns) == 3
        assert [(info.turns, info.persistent) for info in other.sessions.ls()] == [(3, True)]


def test_a_session_that_another_process_went_on_with_meanwhile_is_that_ones(engine, tiny_settings):
    talk(engine, QUESTIONS[:1])
    with unwritable(engine.catalog.strict):
        talk(engine, QUESTIONS[1:2])
    with Engine(tiny_settings) as other:
        talk(other, QUESTIONS[2:3])
    mended(engine)
    talk(engine, QUESTIONS[3:])
    said = [message.text for message in engine.sessions.show("one").messages]
    assert said[::2] == [QUESTIONS[0], QUESTIONS[2], QUESTIONS[3]]


def test_what_a_locked_book_does_not_take_is_written_with_the_next_turn(
    engine, tiny_settings, monkeypatch
):
    with locked(tiny_settings.store), monkeypatch.context() as impatient:
        impatient.setattr(engine.catalog.strict._database, "_timeout_s", 0.05)
        (first,) = talk(engine, QUESTIONS[:1])
    assert "locked" in first.trace.unsaved[0]
    mended(engine)
    assert talk(engine, QUESTIONS[1:2])[0].trace.unsaved == ()
    assert len(Catalog(tiny_settings.store).strict.session(engine.digest, "one")[2]["turns"]) == 2


def test_chunks_that_were_met_while_the_book_fails_are_reused_in_this_process(engine, caplog):
    with broken(engine.catalog.strict):
        assert engine.answer(messages()).trace.unsaved
        engine.flush()
        again = engine.answer(messages())
        plain = engine.answer("\n\n".join([*CHUNKS[:3], "Who counted?"]))
    assert chunk_hits(again.trace) == [True] * len(CHUNKS)
    assert chunk_hits(plain.trace) == [True] * 3
    assert "not saved" not in caplog.text
    assert "not be saved" not in caplog.text


def test_a_prompt_over_a_schema_is_answered_though_the_book_fails(engine):
    engine.schemas.register(PML)
    with broken(engine.catalog.strict):
        assert engine.answer(pml=PROMPT).trace.tokens_reused > 0
    with unwritable(engine.catalog.strict):
        assert engine.schemas.ensure(engine.schemas.show("trip").schema) is None
        with pytest.raises(StoreError, match="is full"):
            engine.schemas.register(PML.replace("trip", "other"))
        assert engine.answer(pml=PROMPT.replace("trip", "other")).text


def test_a_call_that_needs_the_book_fails_clearly(engine):
    talk(engine, QUESTIONS[:1])
    with broken(engine.catalog.strict):
        for asked in (
            engine.sessions.ls,
            lambda: engine.sessions.delete("one"),
            lambda: known_texts(engine, "a"),
            lambda: engine.runtime.learn(engine.runtime.profile),
            lambda: engine.ingest([(CHUNKS[0], "a")]),
            lambda: engine.schemas.names(),
        ):
            with pytest.raises(StoreError, match="disk I/O error"):
                asked()
    assert [info.id for info in engine.sessions.ls()] == ["one"]


def test_kv_of_sessions_is_kept_while_the_book_cannot_be_read(engine):
    talk(engine, QUESTIONS[:2])
    engine.flush()
    keys = engine.sessions.show("one").keys
    with broken(engine.catalog.strict):
        engine.sessions.release(keys)
    assert set(engine.store.lookup(keys)) == set(keys)


def test_a_source_that_the_book_refuses_is_not_known_in_memory_either(engine):
    for learn in (engine.know, engine.ingest):
        with suppress(UnicodeEncodeError, InputError):
            learn([(CHUNKS[0], "half of a character: \ud800")])
        for piece in engine.prompts.pieces(f"{CHUNKS[0]}\n\nWho?"):
            assert piece.source.encode() is not None
