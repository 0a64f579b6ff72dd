"""A set-up that cannot work is one sentence at start: what was wanted, what was found, what
to do.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("TEST_VLLM_PYTHON", "")
WORDS = {
    "option": "lode",
    "load": "later",
    "version": "0.320.0",
    "role": "kv_both",
    "policy": "recompute",
    "parallel": "pipeline_parallel_size",
    "window": "SlidingWindowSpec",
    "one window": "SlidingWindowSpec",
    "layers": "3 layers",
    "cache dtype": "fp8",
    "blocks": "32",
    "place": "cannot be opened",
    "no place": "RAGFUSE_TRANSFER_URL",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, skip_without_vllm: None) -> dict[str, str]:
    """What each set-up says."""
    file = tmp_path_factory.mktemp("setup") / "file"
    file.write_text("no folder")
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[2]}{os.pathsep}{HERE.parent}"}
    environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    done = subprocess.run(
        [PYTHON, "-P", str(HERE / "setups.py"), str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_works_says_nothing(said: dict[str, str]) -> None:
    assert said["good"] == ""
    assert said["transformers of ragfuse"] == []


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_work_says_why(name: str, said: dict[str, str]) -> None:
    assert WORDS[name] in said[name]
