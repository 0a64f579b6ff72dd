"""Ctrl-C and company on real processes: stopped anywhere it says so, leaves nothing half done, and goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from ragfuse.cli.door import app
from tests.tiny import ROOT

COMMAND = [sys.executable, "-c", "from ragfuse.cli import app; app()"]
TELLING = """
import sys
from ragfuse.cli import app

class Telling:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing torch", flush=True)

sys.meta_path.insert(0, Telling())
app()
"""


@pytest.fixture
def environment(tiny_settings, tmp_path):
    ours = {"HOME": tmp_path / "user", "MODEL": tiny_settings.model, "DTYPE": "float32", "MAX_TOKENS": 4}
    return {f"RAGFUSE_{name}": str(value) for name, value in ours.items()}


@pytest.fixture
def start(environment):
    """Starts a command as a process of its own."""

    def start(*arguments, command=COMMAND):
        everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*command, *map(str, arguments)], env=everything, **pipes)

    return start


@pytest.fixture
def told(environment):
    """What a command says as JSON, run right here."""

    def told(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments), "--json", "-"], env=environment)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return told


@pytest.fixture
def long_book(tmp_path):
    file = tmp_path / "long.txt"
    lines = (
        f"In the year {number} the keeper of lighthouse {number} saw {number * 7} ships. " for number in range(5000)
    )
    file.write_text("".join(line + "He wrote it down, and painted his door.\n\n" for line in lines))
    return file


def parts(tmp_path):
    return sorted((tmp_path / "user" / "indexes").rglob("*.json"))


def chunks(tmp_path):
    return sorted((tmp_path / "user" / "store" / "chunks").rglob("*.kv"))


def wait_for(found, process):
    """Wait until `found()` is something, while the process runs."""
    while not found():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def interrupted(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "Stopped." in err


def debris(tmp_path):
    """What a stopped process should not have left: files that are being written, and who writes them."""
    files = [path for path in (tmp_path / "user").rglob("*") if path.is_file()]
    partial = [
        path for path in files if path.name.startswith(".") or "tmp" in path.name or path.parent.name == "writers"
    ]
    return [path for path in partial if path.parent.name != "models"]


def test_ctrl_c_while_indexing_and_while_encoding_leaves_no_debris_and_the_command_goes_on(
    start, told, long_book, tmp_path
):
    process = start("ingest", long_book)
    wait_for(lambda: parts(tmp_path), process)
    interrupted(process)
    indexed = parts(tmp_path)
    assert debris(tmp_path) == []
    assert chunks(tmp_path) == []

    long_book.write_text(long_book.read_text()[:30_000])
    process = start("ingest", long_book)
    wait_for(lambda: len(chunks(tmp_path)) > 3, process)
    answer = told("ask", "Who saw ships in the year 77?")  # while the other one is at work
    if process.poll() is None:
        interrupted(process)
    assert answer["trace"]["segments"][0]["hit"]
    assert debris(tmp_path) == []
    assert not set(indexed) & set(parts(tmp_path))

    kept = len(chunks(tmp_path))
    encoded = told("ingest", long_book)["encoded"]
    new = len(chunks(tmp_path)) - kept
    assert encoded <= new <= 2 * encoded  # a chunk has two entries, of which one may have been there
    assert kept + new > 200
    assert told("ingest", long_book)["encoded"] == 0


def test_ctrl_c_while_it_starts_is_as_clean(start):
    process = start("ask", "Who?", command=[sys.executable, "-c", TELLING])
    assert process.stdout.readline() == "importing torch\n"
    interrupted(process)
