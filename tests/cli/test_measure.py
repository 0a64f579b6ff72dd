"""`ragfuse measure` as a user runs it, on a tiny model."""

import json
import re

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from ragfuse.cli.main import app
from ragfuse.load import timings as measuring
from ragfuse.plan.cost import CostModel


@pytest.fixture
def run(tiny_settings, tmp_path, monkeypatch):
    """Runs a command over the tiny model in a home of its own; what is measured is short."""
    short = {"longest": 128, "rounds": 1}
    monkeypatch.setattr(
        "ragfuse.engine.machine_timings.measure",
        lambda *given, **more: measuring.measure(*given, **short, **more),
    )
    for name, value in (
        ("HOME", tmp_path / "user"),
        ("MODEL", tiny_settings.model),
        ("DTYPE", "float32"),
    ):
        monkeypatch.setenv(f"RAGFUSE_{name}", str(value))
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


def told(result):
    assert result.exit_code == 0, result.output + result.stderr
    return json.loads(result.stdout)


def words_of(result):
    return " ".join(result.output.split())


def test_a_machine_is_measured_shown_and_kept(run, tmp_path):
    result = run("measure", "--store", tmp_path / "store", "--json", tmp_path / "machine.json")
    assert result.exit_code == 0, result.output
    assert "Full prefill of" in result.output
    assert "reading MB/s" in words_of(result)
    assert f"Saved in {tmp_path / 'store'}" in result.output.replace("\n", "")
    assert re.search(r"int8 +[\d,.]+ +0\.\d", result.output)
    profile = TypeAdapter(CostModel).validate_json((tmp_path / "machine.json").read_text())
    assert set(profile.tiers) == {"memory", "disk"}
    assert (set(profile.decode), set(profile.packed)) == ({"int8"}, {"int8"})
    assert 0.1 < profile.packed["int8"] < 0.6
    assert not list(tmp_path.rglob("measure-*"))


def test_all_levels_are_timed_where_a_tier_s_level_is_chosen(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RAGFUSE_LEVELS", json.dumps({"disk": "auto"}))
    result = run("measure", "--store", tmp_path / "store", "--json", tmp_path / "machine.json")
    assert result.exit_code == 0, result.output
    profile = TypeAdapter(CostModel).validate_json((tmp_path / "machine.json").read_text())
    assert set(profile.decode) == {"int8", "cg1", "cg2", "cg3", "cg4"}
    assert profile.packed["cg4"] < profile.packed["cg1"] < profile.packed["int8"]
