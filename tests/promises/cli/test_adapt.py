"""`ragfuse adapt` from the command line: what it says, what it leaves, and how it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ragfuse.adapt import examples, teacher
from ragfuse.adapt.folder import RECIPE_FILE
from ragfuse.calibration import runner
from ragfuse.cli import adapt
from ragfuse.models.adapters import CHUNK_ADAPTER
from ragfuse.models.shipped_profile import SHIPPED_FILE
from tests.kits.cli import variables

CHOSEN = {"policy": "none", "ratio": 0.0, "questions": 12}
MEASURED = {"ttft_x": 6.04, "kl_over_reuse": 0.1, "low": 0, "high": 0, "top1": 1}
CALIBRATED = {
    **CHOSEN,
    "safe": True,
    "tried": [{**CHOSEN, **MEASURED, "outcome": "safe"}],
    "tokens": 500,
    "model": "m",
    "advice": "Blend.",
}
SMALL = """
from ragfuse.adapt import examples, teacher
examples.MAX_QUESTIONS, teacher.ANSWER_TOKENS, examples.SIZES = 2, 2, (2,)
from ragfuse.cli import app
app()
"""


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    return environment | {"RAGFUSE_FILLER_TOKENS": "20"} | dict(runner.MALLOC)


@pytest.fixture
def books(book: Path) -> Path:
    """Two documents of twenty chapters."""
    text = (book / "lighthouses.txt").read_text()
    (book / "windmills.txt").write_text(
        text.replace("lighthouse", "windmill").replace("ships", "sacks")
    )
    return book


@pytest.fixture
def invoke(run: Any, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with small examples; the calibration's result is given."""
    monkeypatch.setattr(examples, "MAX_QUESTIONS", 2)
    monkeypatch.setattr(teacher, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(examples, "SIZES", (2,))
    monkeypatch.setattr(adapt, "calibrate_engine", lambda *given: CALIBRATED)

    def invoke(*arguments: object) -> Result:
        given = ["--docs", books, "--out", tmp_path / "out", "--rank", 2]
        return run("adapt", *given, *arguments)

    return invoke


def test_it_says_what_it_needs_what_it_does_and_what_came_of_it(
    invoke: Any, tmp_path: Path
) -> None:
    result = invoke("--steps", 2, "--json", tmp_path / "result.json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Blend." in result.output
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["steps"] == 2
    assert [each["step"] for each in said["evaluations"]] == [0, 2]
    assert said["calibration"]["questions"] == 12
    shipped = json.loads((tmp_path / "out" / SHIPPED_FILE).read_text())
    assert shipped == {"filler_tokens": 20, "policy": "none", "ratio": 0.0, "version": 1}


def test_ctrl_c_keeps_what_was_learnt_and_the_command_goes_on(
    environment: dict[str, str], run: Any, invoke: Any, books: Path, tmp_path: Path
) -> None:
    given = ["adapt", "--docs", books, "--out", tmp_path / "out", "--rank", 2]
    command = [sys.executable, "-c", SMALL, *map(str, given)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=variables(environment), **pipes)
    while not (tmp_path / "out" / RECIPE_FILE).is_file():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in out + err
    assert "Stopped." in err
    assert not list((tmp_path / "out").rglob(".*"))
    assert (tmp_path / "out" / CHUNK_ADAPTER / "adapter_model.safetensors").is_file()
    assert run("verify", tmp_path / "out").exit_code == 0
    gone_on = invoke("--steps", 5)
    assert gone_on.exit_code == 0, gone_on.output
    assert "Resuming at step " in gone_on.output
