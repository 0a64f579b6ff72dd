"""A set-up that cannot work is one sentence at start: what was wanted, what was found, what
to do.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("TEST_VLLM_PYTHON", "")


def test_a_set_up_that_cannot_work_says_why_and_one_that_does_says_nothing(
    tmp_path: Path, skip_without_vllm: None
) -> None:
    (tmp_path / "file").write_text("no folder")
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[2]}{os.pathsep}{HERE.parent}"}
    environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    command = [PYTHON, "-P", str(HERE / "setups.py"), str(tmp_path / "file")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["good"]) == {""}
    assert [word for word, said in found["bad"].items() if word not in said] == []
    assert found["loaded"] == []  # none of the transformers that ragfuse wants
