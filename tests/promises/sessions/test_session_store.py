"""Sessions looked after: what is listed, exported, deleted and expired, and what several processes
do to one.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragfuse import Ask, Engine, InputError
from ragfuse.cli.entries import OpenStore
from ragfuse.engine.build import ConversationHistory
from tests.kits.sessions import QUESTIONS, is_full_prefill, resent, talk
from tests.kits.store import Clock
from tests.kits.tiny import ROOT, ingest, messages
from tests.promises.sessions.test_history import prepared

GIVEN = {"model", "dtype", "store", "home", "max_tokens"}


def keys_kept(engine):
    engine.flush()
    return {entry.key for entry in engine.store.entries()}


def keys_of(engine, name):
    return set(engine.sessions.show(name).keys)


def test_an_export_is_plain_json_and_says_all(engine):
    answers = talk(engine, QUESTIONS[:2])
    told = json.loads(json.dumps(engine.sessions.export("one")))
    said = resent(QUESTIONS[:2], answers)
    assert told["messages"] == [{"role": role, "content": text} for role, text in said]
    assert len(said) == 4
    assert (
        len(told["tokens"])
        == told["rows"][-1]["hi"]
        == answers[1].trace.tokens + len(answers[1].token_ids) - 1
    )


def test_deleting_frees_just_what_no_other_session_has(engine):
    ingest(engine)
    before = keys_kept(engine)
    talk(engine, QUESTIONS[:1], session="one")
    talk(engine, QUESTIONS[:2], session="two")
    talk(engine, QUESTIONS[2:3], session="one")
    one, two = keys_of(engine, "one"), keys_of(engine, "two")
    shared = one & two
    assert shared
    assert keys_kept(engine) == before | one | two
    done = engine.sessions.delete("one")
    assert keys_kept(engine) == before | two
    assert (done.sessions, done.entries) == (1, 2 * len(one - two))
    assert done.nbytes > 0
    engine.sessions.delete("two")
    assert keys_kept(engine) == before
    assert engine.sessions.ls() == []


def test_deleting_a_session_keeps_the_prefix_that_ingest_stored(engine):
    ingest(engine)
    prefix = engine.prefix(messages())
    engine.ingest([], prefix)
    ingested = keys_kept(engine)
    assert engine.answer(messages(), Ask(session="one")).trace.tokens_prefix == len(prefix) > 0
    engine.sessions.delete("one")
    assert keys_kept(engine) == ingested


@pytest.mark.parametrize("turns", [0, 1])
def test_a_turn_that_nobody_waited_for_leaves_nothing(engine, turns):
    talk(engine, QUESTIONS[:turns])
    kept = keys_kept(engine)
    with engine.stream([("user", QUESTIONS[1])], Ask(session="one", max_tokens=200)) as stream:
        next(iter(stream))
    assert keys_kept(engine) == kept
    for info in engine.sessions.ls():
        engine.sessions.delete(info.id)
    assert keys_kept(engine) == set()


def test_a_later_process_knows_whose_the_kv_is(engine, tiny_settings):
    talk(engine, QUESTIONS[:2])
    with Engine(tiny_settings) as later:
        owners = set(map(later.conversations.conversation_of, keys_of(engine, "one")))
    assert owners == {(engine.digest, "one")}


def test_a_session_that_is_not_there_is_told(engine):
    for do in (engine.sessions.show, engine.sessions.delete, engine.sessions.export):
        with pytest.raises(InputError, match="no session 'none'"):
            do("none")


def test_sessions_that_are_not_used_expire_with_the_kv_that_is_theirs_alone(engine):
    clock = engine.sessions._clock = Clock(1000.0)
    engine.sessions._ttl_s = 60.0
    talk(engine, QUESTIONS[3:], session="old")
    talk(engine, QUESTIONS[:1], session="one")
    engine.flush()
    before = keys_of(engine, "one")
    clock.now += 31
    assert talk(engine, QUESTIONS[:2], session="two")[1].trace.history_reused > 0
    engine.flush()
    clock.now += 30
    again = engine.answer([("user", QUESTIONS[2])], Ask(session="one"))
    assert again.trace.history_reused == 0
    engine.flush()  # overdue sessions are deleted behind the saves
    assert [(info.id, info.turns, info.persistent) for info in engine.sessions.ls()] == [
        ("one", 1, True),
        ("two", 2, True),
    ]
    assert keys_kept(engine) == keys_of(engine, "one") | keys_of(engine, "two")
    assert before & keys_of(engine, "two")


def test_looking_after_sessions_means_the_tenant_whose_salt_is_set(tiny_settings):
    for salt in ("mine", "theirs"):
        with Engine(tiny_settings.model_copy(update={"salt": salt})) as engine:
            talk(engine, QUESTIONS[:1])
    with OpenStore(tiny_settings) as all_of_them:
        assert len(all_of_them.sessions.ls()) == 2
        with pytest.raises(InputError, match="2 models or tenants"):
            all_of_them.sessions.delete("one")
    with OpenStore(tiny_settings.model_copy(update={"salt": "mine"})) as mine:
        assert mine.sessions.delete("one").sessions == 1
        assert mine.sessions.ls() == []
    with OpenStore(tiny_settings) as all_of_them:
        assert len(all_of_them.sessions.ls()) == 1


def test_of_two_questions_that_go_on_at_once_one_is_the_next_turn(engine, caplog):
    talk(engine, QUESTIONS[:1])
    at_once = threading.Barrier(2)
    engine.history.after = lambda *given: (
        at_once.wait(60),
        ConversationHistory.after(engine.history, *given),
    )[1]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda question: talk(engine, [question]), QUESTIONS[1:3]))
    del engine.history.after
    session = engine.sessions.show("one")
    assert len(session.turns) == 2
    assert "continued session one first" in caplog.text
    assert keys_kept(engine) == keys_of(engine, "one")
    assert is_full_prefill(engine, prepared(engine, [("user", QUESTIONS[3])], session="one"))


WRITER = """
    import json, sys
    from ragfuse import Ask, Engine, Settings
    with Engine(Settings(**json.loads(sys.argv[1]))) as engine:
        print("ready", flush=True)
        for number in range(int(sys.argv[2])):
            engine.answer([("user", f"{sys.argv[3]} asks question {number}: why?")], Ask(session="one"))
            print(number, flush=True)
"""


def begun(settings, count, name):
    """A process that asks so many questions of one session."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(WRITER),
            settings.model_dump_json(include=GIVEN),
            str(count),
            name,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def is_whole(engine):
    """Whether every turn has its messages, its tokens are those of its messages, and its KV is
    right or missing.
    """
    session = engine.sessions.show("one")
    for turn in session.turns:
        assert [message.role for message in turn.messages] == ["user", "assistant"]
    ready = prepared(engine, [("user", "So?")], session="one")
    said = engine.model.tokenizer.decode(ready.plan.prompt.token_ids)
    assert all(message.text in said for message in session.messages)
    return is_full_prefill(engine, ready)


@pytest.mark.slow
def test_two_processes_write_one_session_and_it_stays_whole(tiny_settings):
    both = [begun(tiny_settings, 4, name) for name in ("Ann", "Ben")]
    assert [process.wait(240) for process in both] == [0, 0]
    with Engine(tiny_settings) as engine:
        assert 4 <= len(engine.sessions.show("one").turns) <= 8
        assert is_whole(engine)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [1, 3])
def test_a_session_whose_process_is_killed_is_whole_or_lacks_its_last_turn(tiny_settings, turns):
    process = begun(tiny_settings, 50, "Ann")
    for line in process.stdout:
        if line.strip() == str(turns - 1):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Engine(tiny_settings) as engine:
        assert turns <= len(engine.sessions.show("one").turns) <= turns + 3
        assert is_whole(engine)
