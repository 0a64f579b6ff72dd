"""Ctrl-C and company on real processes: stopped anywhere it says so, leaves nothing half done, and
goes on.
"""

import signal
import subprocess
import sys
import time

import pytest

from tests.kits.cli import COMMAND, variables

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
def start(environment):
    """Starts a command as a process of its own."""

    def start(*arguments, command=COMMAND):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        kept = variables(environment)
        return subprocess.Popen([*command, *map(str, arguments)], env=kept, **pipes)

    return start


@pytest.fixture
def long_book(tmp_path):
    file = tmp_path / "long.txt"
    lines = (
        f"In the year {number} the keeper of lighthouse {number} saw {number * 7} ships. "
        for number in range(5000)
    )
    file.write_text("".join(line + "He wrote it down, and painted his door.\n\n" for line in lines))
    return file


def indexes(tmp_path):
    return sorted((tmp_path / "user" / "indexes").glob("*.safetensors"))


def chunks(tmp_path):
    return sorted((tmp_path / "user" / "store" / "chunks").rglob("*.kv"))


def wait_for(found, process):
    """Wait until `found()` is something, while the process runs."""
    while not found():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def interrupted(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "Stopped." in err
    return err


def debris(tmp_path):
    """What a stopped process should not have left: files that are being written, and who writes
    them.
    """
    files = [path for path in (tmp_path / "user").rglob("*") if path.is_file()]
    partial = [
        path
        for path in files
        if path.name.startswith(".") or "tmp" in path.name or path.parent.name == "writers"
    ]
    return [path for path in partial if path.parent.name != "models"]


@pytest.mark.slow
def test_ctrl_c_while_indexing_and_while_encoding_leaves_no_debris_and_the_command_goes_on(
    start, told, long_book, tmp_path
):
    process = start("ingest", long_book)
    wait_for(lambda: list((tmp_path / "user" / "indexes").glob("*.lock")), process)
    interrupted(process)
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
    assert len(indexes(tmp_path)) == 1

    kept = len(chunks(tmp_path))
    encoded = told("ingest", long_book)["encoded"]
    new = len(chunks(tmp_path)) - kept
    # a chunk has two entries, of which one may have been there
    assert encoded <= new <= 2 * encoded
    assert kept + new > 200
    assert told("ingest", long_book)["encoded"] == 0


def test_ctrl_c_while_it_starts_is_as_clean(start):
    process = start("ask", "Who?", command=[sys.executable, "-c", TELLING])
    assert process.stdout.readline() == "importing torch\n"
    assert interrupted(process).strip().endswith("Stopped.")
