"""`ragfuse chat` and `ask --server`: a conversation whose KV survives its turns, here and at a
server.
"""

import re
import signal
import time
from pathlib import Path

import pexpect
import pytest

pytest.importorskip("fastapi", reason="the server's extra is not installed")
pytest.importorskip("uvicorn", reason="the server's extra is not installed")

from ragfuse import Engine, Settings
from ragfuse.serve.keys import Keys
from tests.kits.cli import COMMAND, variables
from tests.kits.serve import BLUE, serving


@pytest.fixture
def environment(environment):
    more = {"TOP_K": "2", "PREFIX_CACHE": "false", "LEARN": "retrieved"}
    return environment | {f"RAGFUSE_{name}": value for name, value in more.items()}


@pytest.fixture
def server(tiny_settings, tmp_path):
    home = tmp_path / "served"
    changes = {"store": home / "store", "home": home, "max_tokens": 6, "api_keys": ()}
    with serving(tiny_settings.model_copy(update=changes), Keys([f"salt-of-blue:{BLUE}"])) as made:
        yield made.of(BLUE)


def conversations(server):
    """Names of the conversations that a server keeps."""
    return [each["id"] for each in server.get("/v1/ragfuse/sessions").json()["data"]]


def summaries(result):
    assert result.exit_code == 0, result.output + result.stderr
    return re.findall(r"^(\d+) tokens: (.*)$", result.stdout, re.MULTILINE)


def test_a_chat_without_a_name_is_gone_at_its_end_and_one_with_a_name_goes_on(run, told, book):
    run("ingest", book)
    run("chat", lines=["What was counted in 1812?"])
    assert told("sessions", "ls")["sessions"] == []
    run("chat", "--session", "harbour", lines=["What was counted in 1812?"])
    again = run("chat", "--session", "harbour", lines=["And in 1813?"])
    assert "of earlier turns" in summaries(again)[0][1]
    (session,) = told("sessions", "ls")["sessions"]
    assert (session["id"], session["turns"]) == ("harbour", 2)


def test_documents_are_added_while_one_talks(run, book):
    result = run(
        "chat", lines=["Hello?", f"/docs add {book}", "/docs", "What was counted in 1812?", "/why"]
    )
    assert "no documents yet" in result.stdout
    assert re.search(r"\d+ chunks of 1 file in 'default'", result.stdout)
    assert re.search(r"\d+ chunks  .*lighthouses\.txt", result.stdout)
    assert "2 of 2 chunks" in summaries(result)[1][1]
    assert "recomputed" in result.stdout


def test_a_chat_goes_on_after_a_line_that_fails(run):
    lines = ["/docs add /nowhere", "/why", "/dance", "/help"]
    result = run("chat", lines=lines)
    said = re.findall(r"^InputError: .*", result.stdout, re.MULTILINE)
    assert len(said) == 3
    assert ("/nowhere" in said[0], "/dance" in said[2]) == (True, True)
    assert "Any other input is a question." in result.stdout
    assert result.exit_code == 1


def test_a_server_is_asked_with_the_documents_of_an_index_here_and_keeps_the_turns(
    run, told, server, book
):
    run("ingest", book)
    at = ("--server", server.root, "--api-key", BLUE)
    there = told("ask", "What was counted in 1812?", *at)["trace"]
    here = told("ask", "What was counted in 1812?")["trace"]
    sources = [each["source"] for each in there["segments"] if each["kind"] == "chunk"]
    assert [Path(source).name for source in sources] == ["lighthouses.txt"] * 2
    assert there["tokens"] == here["tokens"]
    result = run("chat", *at, lines=["What was counted in 1812?", "And in 1813?"])
    assert "of earlier turns" in summaries(result)[1][1]
    assert conversations(server) == []
    run("chat", *at, "--session", "kept", lines=["What was counted in 1812?"])
    assert conversations(server) == ["kept"]


# on a terminal


def until_it_reads(child):
    """Until the child waits for a key at its prompt.

    Python's `input()` notices a signal that comes between the prompt and the read only with the
    next key. Who waits for the interpreter, as threads beside it compute, is woken again and again.
    """
    task, before = Path(f"/proc/{child.pid}/task/{child.pid}/status"), None
    while True:
        now = [line for line in task.read_text().splitlines() if "State" in line or "ctxt" in line]
        if now == before and "sleeping" in now[0]:
            return
        before = now
        time.sleep(0.1)


@pytest.fixture
def terminal(environment):
    """Starts a command on a terminal of its own."""
    started = []

    def start(*arguments):
        program, *options = [*COMMAND, *map(str, arguments)]
        kept = variables(environment, TERM="xterm")
        told = {"env": kept, "dimensions": (40, 120), "encoding": "utf-8", "timeout": 300}
        child = pexpect.spawn(program, options, **told)
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_is_closed_leaves_no_conversation_behind(terminal, told, number):
    child = terminal("chat")
    child.expect("> $")
    child.sendline("Is anybody there?")
    child.expect(r"\d+ tokens: ")
    child.expect("> $")
    until_it_reads(child)
    child.kill(number)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 128 + number
    assert told("sessions", "ls")["sessions"] == []


def test_a_question_of_few_words_is_searched_for_with_the_one_before(run, book):
    (book / "walnuts.txt").write_text(
        "Walnuts are harvested in October, when the village holds a fair for them. " * 3
    )
    run("ingest", book)
    result = run(
        "chat",
        "--top-k",
        1,
        lines=["What is known of walnuts in the village?", "And when?", "/why"],
    )
    assert "walnuts.txt" in result.stdout.partition("part of the prompt")[2]


@pytest.mark.parametrize("where", ["here", "at a server"])
def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(terminal, environment, server, where):
    environment["RAGFUSE_MAX_TOKENS"] = "3000"
    there = ["--server", server.root, "--api-key", BLUE, "--max-tokens", 3000]
    child = terminal("chat", *([] if where == "here" else there))
    child.expect("> $")
    child.sendline("Say something long.")
    child.expect("long[.]\r\n")
    # some of the answer, not the bar before it
    child.expect(r"(?:^|\n|\x1b\[2K)(?! *searching)[a-z ]{20}")
    child.sendintr()
    child.expect("Stopped: this question and its answer are not part of the conversation.")
    child.expect("> $")
    child.sendline("/why")
    child.expect("There is no answer yet")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    if where == "here":
        settings = Settings(
            home=environment["RAGFUSE_HOME"], model=environment["RAGFUSE_MODEL"], dtype="float32"
        )
        with Engine(settings) as engine:
            assert engine.sessions.ls() == []
