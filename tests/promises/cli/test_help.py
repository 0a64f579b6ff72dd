"""Mistakes that are told before anything is loaded."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.kits.cli import variables

LATE = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            print("a model is being loaded")
            raise SystemExit(9)
sys.meta_path.insert(0, Refusing())
from ragfuse.cli import app
app()
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ask Who? --pml /nowhere/at.all", "PMLError: /nowhere/at.all: found no readable file"),
        ("ask Who? --index absent", "InputError: Index 'absent' is empty."),
        (
            "calibrate --docs . --plot /nowhere/x.png",
            "InputError: '/nowhere/x.png' cannot be written",
        ),
        ("adapt --docs /nowhere --out new", "InputError: There is no file or folder"),
        (
            "ask Who? --server nowhere",
            "SettingsError: base_url",
        ),
    ],
)
def test_missing_files_and_servers_are_named_before_a_model_is_loaded(command, said, tmp_path):
    head = json.dumps({"embedder": "minilm-l6", "chunks": [["1", "a", "/a.txt"]]}).encode()
    (tmp_path / "indexes").mkdir()
    empty = {"index": np.zeros(0, np.uint8), "chunks": np.frombuffer(head, np.uint8)}
    save_file(empty, tmp_path / "indexes" / "default.safetensors")
    kept = variables({"RAGFUSE_HOME": str(tmp_path)}, COLUMNS="200")
    run = subprocess.run(
        [sys.executable, "-c", LATE, *shlex.split(command)],
        env=kept,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.stderr.startswith(said), run.stdout + run.stderr
    assert (run.returncode, run.stdout) == (1, "")
