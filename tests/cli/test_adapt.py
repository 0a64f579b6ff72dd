"""`ragfuse adapt` from the command line: what it says, what it leaves, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ragfuse import Settings
from ragfuse.adapt import examples, run, teacher
from ragfuse.adapt.folder import RECIPE_FILE
from ragfuse.calibration import runner
from ragfuse.cli import adapt
from ragfuse.cli.main import app
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.shipped_profile import SHIPPED_FILE
from tests.tiny import ROOT

CALIBRATED = {
    "safe": True,
    "policy": "none",
    "ratio": 0.0,
    "tried": [
        {
            "policy": "none",
            "ratio": 0.0,
            "ttft_x": 6.04,
            "kl_over_reuse": 0.1,
            "low": 0,
            "high": 0,
            "top1": 1,
        }
        | {"is_safe": True, "questions": 12, "outcome": "safe"}
    ],
    "questions": 12,
    "tokens": 500,
    "model": "m",
    "advice": "Blend.",
}
SMALL = """
from ragfuse.adapt import examples, run, teacher
run.QUESTIONS, teacher.ANSWER_TOKENS, examples.SIZES = 2, 2, (2,)
from ragfuse.cli import app
app()
"""


@pytest.fixture
def environment(tiny_settings: Settings, tmp_path: Path) -> dict[str, str]:
    ours = {
        "HOME": tmp_path / "user",
        "MODEL": tiny_settings.model,
        "DTYPE": "float32",
        "FILLER_TOKENS": 20,
    }
    return {f"RAGFUSE_{name}": str(value) for name, value in ours.items()} | dict(runner.MALLOC)


@pytest.fixture
def books(book: Path) -> Path:
    """Two documents of twenty chapters."""
    text = (book / "lighthouses.txt").read_text()
    (book / "windmills.txt").write_text(
        text.replace("lighthouse", "windmill").replace("ships", "sacks")
    )
    return book


@pytest.fixture
def invoke(
    environment: dict[str, str], books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs the command with small examples; the calibration's result is given."""
    monkeypatch.setattr(run, "QUESTIONS", 2)
    monkeypatch.setattr(teacher, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(examples, "SIZES", (2,))
    monkeypatch.setattr(adapt, "calibrate_engine", lambda *given: CALIBRATED)

    def invoke(*arguments: object) -> Result:
        given = [
            "adapt",
            "--docs",
            books,
            "--out",
            tmp_path / "out",
            "--rank",
            2,
            "--questions",
            12,
            *arguments,
        ]
        return CliRunner().invoke(app, [str(each) for each in given], env=environment)

    return invoke


def test_it_says_what_it_needs_what_it_does_and_what_came_of_it(
    invoke: Any, tmp_path: Path
) -> None:
    result = invoke(
        "--steps", 2, "--json", tmp_path / "result.json", "--plot", tmp_path / "curve.png"
    )
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert result.exit_code == 0, (result.output, result.exception)
    out = " ".join(result.output.split())
    assert "2 steps: on held-out documents KL at ratio 0 fell from" in out
    assert "Blend." in out
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["steps"] == 2
    assert [each["step"] for each in said["evaluations"]] == [0, 2]
    assert said["calibration"]["questions"] == 12
    shipped = json.loads((tmp_path / "out" / SHIPPED_FILE).read_text())
    assert shipped == {"filler_tokens": 20, "policy": "none", "ratio": 0.0, "version": 1}
    again = invoke("--steps", 3)
    assert again.exit_code == 0, again.output
    assert "Going on at step 2." in again.output
    assert "3 steps:" in again.output


def test_ctrl_c_keeps_what_was_learnt_and_the_command_goes_on(
    environment: dict[str, str], invoke: Any, books: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-c",
        SMALL,
        "adapt",
        "--docs",
        books,
        "--out",
        tmp_path / "out",
        "--rank",
        2,
    ]
    everything = {**os.environ, **environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: Any = subprocess.Popen(list(map(str, command)), env=everything, **pipes)  # type: ignore[call-overload]
    while not (tmp_path / "out" / RECIPE_FILE).is_file():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in out + err
    assert "Finishing this step" in out
    assert "Stopped. What was learnt is in" in err
    assert not list((tmp_path / "out").rglob(".*"))
    assert (tmp_path / "out" / CHUNK_ADAPTER / "adapter_model.safetensors").is_file()
    answer = CliRunner().invoke(app, ["verify", str(tmp_path / "out")], env=environment)
    assert answer.exit_code == 0, answer.output
    gone_on = invoke("--steps", 5)
    assert gone_on.exit_code == 0, gone_on.output
    assert "Going on at step " in gone_on.output
