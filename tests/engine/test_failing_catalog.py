"""A store whose book cannot be read or written: every question is answered all the same, and what
the book does not take is remembered by the process, counted, told once and named in the trace.
"""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing, contextmanager, suppress
from os import statvfs

import pytest

from ragfuse import Engine, InputError, StoreError, metrics
from ragfuse.store import CatalogFile
from ragfuse.store.catalog import COOL_DOWN_S
from tests.sessions.kit import QUESTIONS, talk
from tests.store.kit import Clock
from tests.tiny import CHUNKS, chunk_hits, known_texts, messages

PML = (
    '<schema name="trip"><module name="a">The keeper counted forty ships in one'
    " night.</module></schema>"
)
PROMPT = '<prompt schema="trip"><a/>Who counted them?</prompt>'


@contextmanager
def broken(book, error="disk I/O error"):
    """A book whose file refuses every read and write."""
    database = book._database
    real = database.query, database.write

    def refuse(*_, **__):
        raise StoreError(error)

    database.query = database.write = refuse
    try:
        yield
    finally:
        database.query, database.write = real


@contextmanager
def unwritable(book):
    """A book that can be read and not written, as on a full disk."""
    database = book._database
    real = database.write

    def refuse(*_, **__):
        raise StoreError("database or disk is full")

    database.write = refuse
    try:
        yield
    finally:
        database.write = real


@contextmanager
def locked(path):
    """A book that another process holds for itself."""
    with closing(sqlite3.connect(path / "catalog.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def mended(engine):
    """The book is tried again at once."""
    engine.catalog._breaker.succeeded()


@pytest.fixture
def clock(engine):
    """The clock by which the engine leaves its book alone."""
    engine.catalog._breaker._clock = clock = Clock()
    return clock


@pytest.mark.parametrize("fault", [broken, unwritable])
def test_a_sessions_question_is_answered_though_the_book_fails_and_the_trace_says_so(
    engine, fault, caplog
):
    (first,) = talk(engine, QUESTIONS[:1])
    assert first.trace.unsaved == ()
    with fault(engine.catalog.file):
        answers = talk(engine, QUESTIONS[1:3])
        assert engine.sessions.get(engine.digest, "one") is not None
    assert all(answer.text for answer in answers)
    for answer in answers:
        (said,) = answer.trace.unsaved
        assert str(engine.catalog.file.path) in said
        assert "disk" in said
    assert sum("goes on without it" in record.message for record in caplog.records) == 1
    assert answers[-1].trace.as_dict()["unsaved"] == list(answers[-1].trace.unsaved)


@pytest.mark.parametrize("fault", [broken, unwritable])
def test_a_session_goes_on_from_the_turns_that_the_book_did_not_take(engine, fault):
    before = talk(engine, QUESTIONS[:1])
    with fault(engine.catalog.file):
        answers = talk(engine, QUESTIONS[1:3])
        _, session = engine.sessions.get(engine.digest, "one")
        assert len(session.turns) == 3
        said = [message.text for message in session.messages]
    assert said[::2] == list(QUESTIONS[:3])
    assert said[1::2] == [answer.text for answer in (*before, *answers)]
    assert answers[-1].trace.history_reused > answers[0].trace.history_reused > 0


def test_what_the_book_did_not_take_is_written_with_the_next_turn(engine, tiny_settings):
    talk(engine, QUESTIONS[:1])
    with unwritable(engine.catalog.file):
        talk(engine, QUESTIONS[1:2])
    assert len(CatalogFile(tiny_settings.store).session(engine.digest, "one")[2]["turns"]) == 1
    mended(engine)
    (last,) = talk(engine, QUESTIONS[2:3])
    assert last.trace.unsaved == ()
    with Engine(tiny_settings) as other:
        assert len(other.sessions.show("one").turns) == 3
        assert [(info.turns, info.persistent) for info in other.sessions.ls()] == [(3, True)]


def test_a_session_that_another_process_went_on_with_meanwhile_is_that_ones(engine, tiny_settings):
    talk(engine, QUESTIONS[:1])
    with unwritable(engine.catalog.file):
        talk(engine, QUESTIONS[1:2])
    with Engine(tiny_settings) as other:
        talk(other, QUESTIONS[2:3])
    mended(engine)
    talk(engine, QUESTIONS[3:])
    said = [message.text for message in engine.sessions.show("one").messages]
    assert said[::2] == [QUESTIONS[0], QUESTIONS[2], QUESTIONS[3]]


def test_a_locked_book_is_waited_for_once_and_then_left_alone(
    engine, tiny_settings, clock, monkeypatch
):
    waited = []
    real = engine.catalog.file._database.write
    monkeypatch.setattr(
        engine.catalog.file._database,
        "write",
        lambda: waited.append(1) or real(),
    )
    with locked(tiny_settings.store), monkeypatch.context() as impatient:
        impatient.setattr(engine.catalog.file._database, "_timeout_s", 0.05)
        (first,) = talk(engine, QUESTIONS[:1])
        asked = len(waited)
        (second,) = talk(engine, QUESTIONS[1:2])
        assert len(waited) == asked
        clock.now += COOL_DOWN_S + 1
        (third,) = talk(engine, QUESTIONS[2:3])
        assert len(waited) > asked
    assert all("locked" in answer.trace.unsaved[0] for answer in (first, second, third))
    clock.now += COOL_DOWN_S + 1
    assert talk(engine, QUESTIONS[3:])[0].trace.unsaved == ()
    assert len(CatalogFile(tiny_settings.store).session(engine.digest, "one")[2]["turns"]) == 4


def test_chunks_that_were_met_while_the_book_fails_are_reused_in_this_process(engine, caplog):
    with broken(engine.catalog.file):
        engine.answer(messages())
        engine.flush()
        again = engine.answer(messages())
        plain = engine.answer("\n\n".join([*CHUNKS[:3], "Who counted?"]))
    assert chunk_hits(again.trace) == [True] * len(CHUNKS)
    assert chunk_hits(plain.trace) == [True] * 3
    assert "not saved" not in caplog.text
    assert "not be saved" not in caplog.text


def test_known_texts_that_could_not_be_read_are_read_later(engine, tiny_settings):
    engine.ingest([(text, "a") for text in CHUNKS])
    with Engine(tiny_settings) as other:
        _ = other.model
        with broken(other.catalog.file):
            assert chunk_hits(other.answer("\n\n".join([*CHUNKS[:3], "Who?"])).trace) == []
        mended(other)
        assert chunk_hits(other.answer("\n\n".join([*CHUNKS[:3], "Who?"])).trace) == [True] * 3


def test_a_model_is_loaded_though_the_book_fails(tiny_settings):
    with Engine(tiny_settings) as engine, broken(engine.catalog.file):
        assert engine.answer(messages()).trace.unsaved


def test_a_prompt_over_a_schema_is_answered_though_the_book_fails(engine):
    engine.schemas.register(PML)
    with broken(engine.catalog.file):
        assert engine.answer(pml=PROMPT).trace.tokens_reused > 0
    with unwritable(engine.catalog.file):
        assert engine.schemas.ensure(engine.schemas.show("trip").schema) is None
        with pytest.raises(StoreError, match="is full"):
            engine.schemas.register(PML.replace("trip", "other"))
        assert engine.answer(pml=PROMPT.replace("trip", "other")).text


def test_what_somebody_asks_the_book_for_by_itself_fails_clearly(engine):
    talk(engine, QUESTIONS[:1])
    with broken(engine.catalog.file):
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


def test_kv_whose_owner_cannot_be_asked_is_not_dropped(engine):
    talk(engine, QUESTIONS[:2])
    engine.flush()
    keys = engine.sessions.show("one").keys
    with broken(engine.catalog.file):
        engine.sessions.release(keys)
    assert set(engine.store.lookup(keys)) == set(keys)


def test_failures_of_the_book_are_counted(engine):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    metrics(engine, registry)
    with broken(engine.catalog.file):
        talk(engine, QUESTIONS[:1])
    shown = prometheus.generate_latest(registry).decode().splitlines()
    counted = [line for line in shown if line.startswith("ragfuse_catalog_failures_total")]
    assert float(counted[-1].split()[-1]) == engine.catalog.failures > 0


def test_answers_of_a_batch_name_what_was_not_saved(engine):
    with broken(engine.catalog.file):
        answers = engine.batch([messages(), messages(CHUNKS[:2])])
    assert [bool(answer.trace.unsaved) for answer in answers] == [True, True]
    mended(engine)
    assert [answer.trace.unsaved for answer in engine.batch([messages()])] == [()]
    mended(engine)
    assert [answer.trace.unsaved for answer in engine.batch([messages()])] == [()]


def test_sessions_over_a_disk_that_is_really_full_are_answered(tmp_path, tiny_settings):
    path = tmp_path / "small"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=False
    ).returncode:
        pytest.skip(
            "a small file system cannot be mounted here: run the tests as root, with CAP_SYS_ADMIN"
        )
    try:
        with Engine(tiny_settings.model_copy(update={"store": path})) as engine:
            talk(engine, QUESTIONS[:1])
            engine.flush()
            with (path / "ballast").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            assert statvfs(path).f_bavail == 0
            answers = []
            for number in range(40):  # the log of the book takes some more before it has to grow
                answers += talk(engine, [f"{number}. {QUESTIONS[1]} " + "Say all of it. " * 8])
                if answers[-1].trace.unsaved:
                    break
            answers += talk(engine, QUESTIONS[2:])
            assert all(answer.text for answer in answers)
            assert answers[-1].trace.unsaved
            assert answers[-1].trace.history_reused > 0
            assert len(engine.sessions.get(engine.digest, "one")[1].turns) == 1 + len(answers)
            (path / "ballast").unlink()
            mended(engine)
            assert talk(engine, QUESTIONS[:1])[0].trace.unsaved == ()
            assert len(engine.sessions.show("one").turns) == 2 + len(answers)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_what_the_book_refuses_for_what_it_is_is_not_known_in_memory_either(tiny_settings):
    """Half of a character in a source: kept in memory alone, it would be in the trace of every
    later answer.
    """
    with Engine(tiny_settings) as engine:
        for learn in (
            lambda: engine.know([(CHUNKS[0], "t\ud800")]),
            lambda: engine.ingest([(CHUNKS[0], "t\ud800")]),
        ):
            with suppress(UnicodeEncodeError, InputError):
                learn()
            sources = [piece.source for piece in engine.prompts.pieces(f"{CHUNKS[0]}\n\nWho?")]
            assert all(source.encode() is not None for source in sources)
