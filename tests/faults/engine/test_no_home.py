"""A home that cannot be written: answers come from memory, with one warning; what is to be kept is
refused.
"""

import os
import subprocess
import sys

import pytest

from tests.promises.models.test_gguf import write_gguf

PROGRAM = """
import shutil, sys
usage = shutil.disk_usage("/")
shutil.disk_usage = lambda path: usage._replace(free=0)  # weights have no room in a temporary folder either
from ragfuse import Engine, Settings
from ragfuse.cli.main import app
from ragfuse.serve.service import Service

WORDS = "tides and keepers " * 9
engines = Engine(), Engine.shared(Settings(top_k=3)), Engine(Service(Settings()).settings)
answers = [engine.answer(WORDS) for engine in engines * 2]
assert len({answer.text for answer in answers}) == 1
assert answers[-1].trace.tokens_reused > 0
app(["ask", "Who kept it?", "--docs", sys.argv[1], "--top-k", "1"], standalone_mode=False)
"""


@pytest.fixture
def environment(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "notes.md").write_text("The light was kept by Ada Lorne. " * 9)
    named = {
        "HOME": "/proc/home",
        "MODEL": str(tmp_path / "tiny.gguf"),
        "DTYPE": "float32",
        "MAX_TOKENS": "4",
    }
    return {
        **os.environ,
        **{f"RAGFUSE_{name}": value for name, value in named.items()},
        "TMPDIR": str(tmp_path),
    }


def test_questions_are_answered_from_memory_with_one_warning(environment, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "notes.md")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RAGFUSE_HOME") == 1
    assert "Other users" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.md", "tiny.gguf"]


def test_an_ingest_is_refused_naming_the_one_folder(environment, tmp_path):
    called = [sys.executable, "-m", "ragfuse", "ingest", "notes.md"]
    done = subprocess.run(
        called, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "RAGFUSE_HOME" in done.stderr.splitlines()[-1]
