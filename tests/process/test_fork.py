"""A process that is forked after it has loaded a model: everything goes on in the child, and nothing is done twice.

Every child has a hard limit of time, after which it is killed and the test fails: what would hang for ever does not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import urllib.request
import warnings
import weakref
from pathlib import Path

import pytest

from ragfuse import Ask, Engine, InputError, metrics
from ragfuse.hf.lock import FairLock
from ragfuse.process.fork import ForkLock, at_fork, is_torn
from ragfuse.store import CatalogFile
from ragfuse.store.database import Database
from ragfuse.store.folder import FolderWriter
from ragfuse.store.writer import Writer
from tests.sessions.kit import QUESTIONS, talk
from tests.store.redis_server import RedisServer
from tests.tiny import CHUNKS, ROOT, chunk_hits, messages

LIMIT_S = 60.0
FORK = multiprocessing.get_context("fork")


def in_child(work, limit_s=LIMIT_S):
    """What `work()` gives in a forked child; killed, and failed, after `limit_s`."""
    ours, theirs = FORK.Pipe(duplex=False)

    def run():
        faulthandler.dump_traceback_later(limit_s / 2, exit=False)  # where it waits
        try:
            theirs.send((True, work()))
        except BaseException:
            theirs.send((False, traceback.format_exc()))

    process = FORK.Process(target=run, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    try:
        assert ours.poll(limit_s), f"the child said nothing for {limit_s} s"
        done, found = ours.recv()
        assert done, found
        process.join(limit_s)
        assert process.exitcode == 0
        return found
    finally:
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def held(lock):
    """A lock that another thread of this process holds."""
    ready, leave = threading.Event(), threading.Event()

    def hold():
        with lock:
            ready.set()
            leave.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def used(engine):
    """All that an engine does in the background was done at least once, so that its threads are there or were."""
    engine.ingest([(text, "book") for text in CHUNKS[:2]])
    engine.answer(messages())
    engine.prefetch(CHUNKS[:2])
    talk(engine, QUESTIONS[:1])
    engine.flush()


@pytest.fixture(params=["memory", "disk"])
def parent(request, tiny_settings):
    """An engine that was used, with a memory tier or on disk alone, with prefix caching and learning on."""
    change = {"prefix_cache": True, "learn": "text"}
    if request.param == "disk":
        change |= {"memory_bytes": 0, "prefix_cache": False}
    with Engine(tiny_settings.model_copy(update=change)) as engine:
        used(engine)
        yield engine


def test_an_engine_answers_saves_flushes_and_closes_in_a_child(parent):
    wanted = parent.answer(messages(), Ask(reuse=False)).text

    def work():
        texts = [parent.answer(messages(), Ask(reuse=False)).text]
        more = parent.answer(messages([*CHUNKS[2:], "A chunk that only the child has met, long enough to be kept."]))
        parent.prefetch(CHUNKS)
        parent.flush()
        again = parent.answer(messages([*CHUNKS[2:], "A chunk that only the child has met, long enough to be kept."]))
        parent.close()
        return texts, len(more.trace.segments) > 0, chunk_hits(again.trace)

    texts, _, hits = in_child(work)
    assert texts == [wanted]
    assert all(hits)
    parent.answer(messages())
    parent.flush()


def test_sessions_go_on_in_a_child_and_the_parent_goes_on_from_there(parent):
    def work():
        answers = talk(parent, QUESTIONS[1:3])
        parent.flush()
        return [answer.trace.history_reused for answer in answers], [info.turns for info in parent.sessions.ls()]

    reused, turns = in_child(work)
    assert all(reused)
    assert turns == [3]
    assert parent.sessions.show("one").messages[2].text == QUESTIONS[1]
    assert talk(parent, QUESTIONS[3:])[0].trace.unsaved == ()
    assert len(parent.sessions.show("one").turns) == 4


def test_several_children_and_the_parent_write_one_store_at_the_same_time(parent, tiny_settings):
    def work(number):
        for question in QUESTIONS:
            parent.answer([("user", question)], Ask(session=f"child-{number}"))
            parent.answer(messages([*CHUNKS, f"A chunk that only child {number} has met, long enough to be kept."]))
        parent.flush()
        return parent.store.stats().dropped_writes, parent.counters.now().sums["catalog_failures"]

    pool = [
        threading.Thread(target=lambda number=number: found.append(in_child(lambda: work(number)))) for number in (1, 2)
    ]
    found = []
    for thread in pool:
        thread.start()
    talk(parent, QUESTIONS, session="own")
    parent.flush()
    for thread in pool:
        thread.join()
    assert found == [(0, 0), (0, 0)]
    turns = {info.id: info.turns for info in parent.sessions.ls()}
    assert turns == {"one": 1, "own": 4, "child-1": 4, "child-2": 4}
    with (
        closing_db(tiny_settings.store / "catalog.sqlite") as book,
        closing_db(tiny_settings.store / "index.sqlite") as index,
    ):
        assert book.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert index.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def closing_db(path):
    return contextlib.closing(sqlite3.connect(path))


def test_a_stream_and_a_batch_are_answered_in_a_child(parent):
    def work():
        with parent.stream(messages()) as stream:
            said = "".join(stream)
        return said, [answer.text for answer in parent.batch([messages(), messages(CHUNKS[:2])])]

    said, batch = in_child(work)
    assert said
    assert len(batch) == 2


def test_a_shared_engine_and_its_model_are_the_childs_too(tiny_settings):
    engine = Engine.shared(tiny_settings)
    try:
        used(engine)

        def work():
            mine = Engine.shared(tiny_settings)
            other = Engine.shared(tiny_settings.model_copy(update={"max_tokens": 4}))
            return (
                mine is engine,
                other.model is engine.model,
                other.answer(messages()).text,
                mine.answer(messages()).text,
            )

        same, model, short, text = in_child(work)
        assert (same, model) == (True, True)
        assert short
        assert text
    finally:
        engine.close()


def test_a_child_counts_its_own_answers_alone(parent):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    metrics(parent, registry)
    before = parent.counters.now().sums["written"]
    assert before

    def work():
        parent.answer(messages())
        shown = prometheus.generate_latest(registry).decode()
        return sum(parent.counters.now().ttft), "ragfuse_answers_total" in shown

    assert in_child(work) == (1, True)
    assert parent.counters.now().sums["written"] == before


@pytest.fixture
def whole(tiny_settings):
    """An engine that was used, with everything on."""
    with Engine(tiny_settings.model_copy(update={"prefix_cache": True, "learn": "text"})) as engine:
        used(engine)
        yield engine


def test_no_lock_that_another_thread_held_at_the_fork_holds_up_the_child(whole):
    def work():
        answers = [whole.answer(messages(CHUNKS[::-1])), *talk(whole, QUESTIONS[1:2])]
        whole.register('<schema name="trip"><module name="a">The keeper counted ships.</module></schema>')
        answers.append(whole.answer(pml='<prompt schema="trip"><a/>Who?</prompt>'))
        whole.prefetch(CHUNKS)
        whole.know([("A text that is known from now on, and long enough for a chunk.", "here")])
        whole.store.stats()
        whole.flush()
        whole.close()
        return all(answer.text for answer in answers)

    locks = {where: lock for where, lock in locks_of(whole) if "_database" not in where}
    waited_for = (whole.model.lock, whole.model._encoding)  # by a fork
    locks = {where: lock for where, lock in locks.items() if all(lock is not each for each in waited_for)}
    assert len(locks) > 40
    with contextlib.ExitStack() as all_held:
        for lock in locks.values():
            all_held.enter_context(held(lock))
        assert in_child(work)


def locks_of(root):
    """Where below an object of ours there are locks, conditions and semaphores."""
    kinds = type(threading.Lock()), type(threading.RLock()), threading.Condition, ForkLock, FairLock
    met, left = set(), [("engine", root)]
    while left:
        where, at = left.pop()
        if id(at) in met:
            continue
        met.add(id(at))
        if isinstance(at, kinds):
            yield where, at
            continue
        if isinstance(at, dict):
            left += [(f"{where}[{name!r:.30}]", value) for name, value in list(at.items())[:50]]
        elif isinstance(at, list | tuple | set | frozenset):
            left += [(f"{where}[{number}]", value) for number, value in enumerate(list(at)[:50])]
        elif type(at).__module__.startswith("ragfuse"):
            fields = dict(getattr(at, "__dict__", {}))
            left += [(f"{where}.{name}", value) for name, value in fields.items()]


def test_a_fork_waits_for_the_model_that_another_thread_computes_with(whole):
    came, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            came.append(whole.answer(messages(), Ask(reuse=len(came) % 2 == 0)).text)

    wanted = {whole.answer(messages(), Ask(reuse=reuse)).text for reuse in (True, False)}
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        texts = [in_child(lambda: whole.answer(messages(), Ask(reuse=False)).text) for _ in range(8)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(set(texts)) == 1
    assert set(texts) <= wanted
    assert set(came) <= wanted


def test_what_was_queued_in_the_parent_stays_the_parents():
    done, gate = [], threading.Event()
    writer = Writer()
    writer.submit(gate.wait)
    for number in range(5):
        writer.submit(lambda number=number: done.append(number))

    def work():
        writer.submit(lambda: done.append("child"))
        return writer.flush(10), writer.close(10), done

    assert in_child(work) == (True, True, ["child"])
    gate.set()
    assert writer.close(10)
    assert done == [0, 1, 2, 3, 4]


def test_a_turn_that_the_parent_is_saving_does_not_hold_up_the_child(tiny_settings, monkeypatch):
    with Engine(tiny_settings) as engine:
        used(engine)
        gate = threading.Event()
        engine._stages.history._writer.submit("history", gate.wait)
        talk(engine, QUESTIONS[1:2])
        began = time.monotonic()
        monkeypatch.setattr("ragfuse.engine.history.TURN_SAVE_WAIT_S", 2 * LIMIT_S)
        assert in_child(lambda: bool(talk(engine, QUESTIONS[2:3])[0].text))
        gate.set()
        engine.flush()
        assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize("session", [None, "one"])
def test_a_beginning_that_the_parent_is_saving_is_not_waited_for_by_the_child(tiny_settings, monkeypatch, session):
    monkeypatch.setattr("ragfuse.engine.prefix_cache.PREFIX_SAVE_WAIT_S", 2 * LIMIT_S)
    asked = [("system", "Answer shortly and name the page. " * 8), ("user", "Who counted the ships in that night?")]
    with Engine(tiny_settings.model_copy(update={"prefix_cache": True, "min_chunk_tokens": 4})) as engine:
        wanted = engine.answer(messages(), Ask(reuse=False)).text
        gate = threading.Event()
        for writer, place in ((engine._stages.prefixes._writer, "prefix"), (engine._stages.history._writer, "history")):
            writer.submit(place, gate.wait)
        try:
            first = engine.answer(asked, Ask(session=session)).text
            assert engine._stages.prefixes._waiting, "what the prompt begins with is still being saved"

            def work():
                again = engine.answer(asked).text
                more = engine.answer([*asked, ("assistant", first), ("user", "And then?")]).text
                engine.flush()
                waiting, saved = set(engine._stages.prefixes._waiting), engine.answer(asked)
                return again, bool(more), waiting, saved.text, saved.trace.tokens_prefix > 0

            assert in_child(work) == (first, True, set(), first, True)
        finally:
            gate.set()
        engine.flush()
        assert engine.answer(messages(), Ask(reuse=False)).text == wanted


def test_a_fork_amid_a_write_to_the_book_finds_it_at_rest(tmp_path):
    with CatalogFile(tmp_path) as book:
        stop = threading.Event()

        def write():
            number = 0
            while not stop.is_set():
                book.put(f"profile-{number % 7}", {"number": number})
                number += 1

        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(10):

                def work(number=number):
                    book.put(f"child-{number}", {"number": number})
                    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as other:
                        sound = other.execute("PRAGMA integrity_check").fetchone()
                    return book.get(f"child-{number}"), sound

                assert in_child(work) == ({"number": number}, ("ok",))
                assert book.get(f"child-{number}") == {"number": number}
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_no_connection_to_sqlite_is_open_while_a_process_is_forked(tmp_path):
    seen = []

    class Watch:
        def pause(self):
            seen.append((database._reader, database._writer))

        def resume(self):
            pass

        def renew(self):
            pass

    watch = Watch()
    at_fork(watch)  # older than the database: it is paused behind it
    database = Database(tmp_path / "a.sqlite", "CREATE TABLE IF NOT EXISTS t(x)", 1)
    assert database.query("SELECT count(*) FROM t") == [(0,)]
    assert in_child(lambda: database.query("SELECT count(*) FROM t")) == [(0,)]
    assert seen == [(None, None)]
    assert database.query("SELECT count(*) FROM t") == [(0,)]
    database.close()


def test_a_closed_database_stays_closed_behind_a_fork(tmp_path):
    database = Database(tmp_path / "a.sqlite", "CREATE TABLE IF NOT EXISTS t(x)", 1)
    database.close()
    in_child(lambda: None)
    with pytest.raises(sqlite3.ProgrammingError):
        database.query("SELECT 1")


def test_a_writer_of_a_folder_is_dead_when_its_process_is_though_a_child_lives(tmp_path):
    (tmp_path / "writers").mkdir()
    owner = FolderWriter(tmp_path / "writers")
    other = FolderWriter(tmp_path / "writers")

    def work():
        token = owner.token
        return token, owner.is_me(token), FolderWriter(tmp_path / "writers").is_alive(token)

    token, is_me, is_alive = in_child(work)
    assert token != owner.token
    assert is_me
    assert is_alive
    ours, theirs = FORK.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = FORK.Process(target=lambda: (theirs.send("ready"), theirs.recv()), daemon=True)
        child.start()
    try:
        assert ours.poll(LIMIT_S)
        assert other.is_alive(owner.token)
        os.close(owner._fd)  # as when the process dies
        owner._fd = -1
        assert not other.is_alive(owner._token)
    finally:
        ours.send(None)
        child.join(LIMIT_S)
        child.kill()


def test_a_stream_of_the_parents_ends_with_a_clear_error_in_the_child(whole):
    def work():
        try:
            list(stream)
        except InputError as error:
            return str(error)
        return ""

    with held(whole.counters._lock):  # an answer is counted at its end
        stream = whole.stream(messages())
        assert "is a fork" in in_child(work)
    assert stream.answer.text


def test_a_lock_that_was_held_says_that_what_it_guards_is_torn():
    torn = []
    free, taken, condition = (
        ForkLock(lambda: torn.append("free")),
        ForkLock(lambda: torn.append("taken")),
        threading.Condition(),
    )

    def work():
        with free, taken:
            return torn, is_torn(condition)

    with held(taken), held(condition):
        assert in_child(work) == (["taken"], True)
    assert torn == []
    assert not is_torn(condition)


def test_an_owner_is_held_weakly_and_one_that_fails_is_passed_over(caplog):
    class Renewed:
        def __init__(self, fails=False):
            self.fails, self.times = fails, 0
            at_fork(self)

        def renew(self):
            self.times += 1
            if self.fails:
                raise RuntimeError("not ready")

    one, bad, gone = Renewed(), Renewed(fails=True), Renewed()
    reference = weakref.ref(gone)
    del gone
    assert reference() is None
    assert in_child(lambda: (one.times, bad.times)) == (1, 1)
    assert (one.times, bad.times) == (0, 0)


def test_the_model_lock_stays_with_the_thread_that_forked():
    lock = FairLock()
    with lock:
        assert in_child(lambda: lock.is_mine)
    assert not lock.is_mine


def test_a_tier_on_redis_goes_on_in_a_child_and_in_the_parent(tiny_settings):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stopping:
        server = RedisServer(Path(folder))
        stopping.callback(server.kill)
        url = server.url()
        settings = tiny_settings.model_copy(update={"tiers": (url,), "memory_bytes": 0, "disk_bytes": 0})
        with Engine(settings) as engine:
            engine.ingest([(text, "book") for text in CHUNKS])

            def work():
                answers = [engine.answer(messages()) for _ in range(3)]
                engine.flush()
                return [chunk_hits(answer.trace) for answer in answers]

            assert in_child(work) == [[True] * len(CHUNKS)] * 3
            assert chunk_hits(engine.answer(messages()).trace) == [True] * len(CHUNKS)


def test_a_tier_behind_a_url_goes_on_in_a_child(tiny_settings, tmp_path):
    url = (tmp_path / "far").as_uri()
    with Engine(tiny_settings.model_copy(update={"tiers": (url,), "memory_bytes": 0, "disk_bytes": 0})) as engine:
        engine.ingest([(text, "book") for text in CHUNKS])

        def work():
            hits = chunk_hits(engine.answer(messages()).trace)
            engine.ingest([("Another text of the child, which is long enough to be kept in the store.", "child")])
            engine.flush()
            return hits

        assert in_child(work) == [True] * len(CHUNKS)


COMPUTES = """
    import os, signal, sys, threading
    import torch
    torch.set_num_threads(2)
    from ragfuse import Engine, Settings
    sys.path.insert(0, {root!r})
    from tests.tiny import messages
    with Engine(Settings(model={model!r}, dtype="float32", store={store!r}, max_tokens=8)) as engine:
        big = torch.randn(700, 700)
        big @ big
        wanted = engine.answer(messages()).text
        child = os.fork()
        if not child:
            signal.alarm(60)
            big @ big
            mine = engine.answer(messages()).text == wanted
            threads = []
            def other():
                threads.append(torch.get_num_threads())
                big @ big
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            engine.close()
            os._exit(0 if mine and threads == [2] else 7)
        _, status = os.waitpid(child, 0)
        print("status", status, torch.get_num_threads())
"""


@pytest.mark.slow
def test_a_child_computes_though_its_parent_had_several_threads_of_openmp(varied_path, tmp_path):
    code = textwrap.dedent(COMPUTES).format(root=str(ROOT), model=str(varied_path), store=str(tmp_path / "store"))
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.split() == ["status", "0", "2"], done.stderr


APP = """
    import json, os, sys
    sys.path.insert(0, {root!r})
    from ragfuse import Ask, Engine, Settings
    from tests.tiny import messages
    engine = Engine(Settings(model={model!r}, dtype="float32", store={store!r}, max_tokens=8))
    first = engine.answer(messages(), Ask(session="loaded"))
    master = os.getpid()
    def app(environ, start_response):
        answer = engine.answer([("user", "Who counted the ships?")], Ask(session=environ["PATH_INFO"].strip("/")))
        engine.flush()
        start_response("200 OK", [("content-type", "application/json")])
        told = {{"pid": os.getpid(), "master": master, "text": answer.text, "unsaved": answer.trace.unsaved}}
        return [json.dumps(told).encode()]
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gunicorn") is None, reason="gunicorn is not installed")
@pytest.mark.parametrize("worker", ["sync", "gthread"])
def test_gunicorns_workers_answer_with_an_engine_that_was_loaded_before_they_were_forked(varied_path, tmp_path, worker):
    import json
    import socket

    given = {"root": str(ROOT), "model": str(varied_path), "store": str(tmp_path / "store")}
    (tmp_path / "prefork.py").write_text(textwrap.dedent(APP).format(**given))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--preload",
        "--workers",
        "2",
        "--worker-class",
        worker,
        "--threads",
        "2",
    ]
    server = subprocess.Popen(
        [*command, "--threads", "2", "--timeout", "30", "--bind", f"127.0.0.1:{port}", "prefork:app"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        answers = []
        for number in range(12):
            answers.append(json.loads(fetched(f"http://127.0.0.1:{port}/s{number % 3}", server)))
        assert all(answer["text"] and not answer["unsaved"] for answer in answers)
        assert all(answer["pid"] != answer["master"] for answer in answers)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    with CatalogFile(tmp_path / "store") as book:
        assert {line.id: line.turns for line in book.sessions.rows()} == {"loaded": 1, "s0": 4, "s1": 4, "s2": 4}


def fetched(url, server):
    """What a server answers, once it is up."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as reply:
                return reply.read()
        except (ConnectionError, urllib.error.URLError):
            assert server.poll() is None, server.stdout.read()
            assert time.monotonic() < until
            time.sleep(0.1)
