"""`ragfuse measure` as a user runs it, on a tiny model."""

import json
import re
from pathlib import Path

import pytest
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
    profile = CostModel.from_dict(json.loads((tmp_path / "machine.json").read_text()))
    assert set(profile.tiers) == {"memory", "disk"}
    assert (set(profile.decode), set(profile.packed)) == ({"int8"}, {"int8"})
    assert 0.1 < profile.packed["int8"] < 0.6
    assert not list(tmp_path.rglob("measure-*"))


def test_measuring_says_at_which_level_a_tier_is_written_whose_level_is_chosen(
    run, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAGFUSE_LEVELS", json.dumps({"disk": "auto"}))
    result = run("measure", "--store", tmp_path / "store", "--json", tmp_path / "machine.json")
    said = words_of(result)
    assert re.search(r"New chunks of 160 tokens are written into disk as (raw|int8|cg\d)", said)
    profile = CostModel.from_dict(json.loads((tmp_path / "machine.json").read_text()))
    assert set(profile.decode) == {"int8", "cg1", "cg2", "cg3", "cg4"}
    assert profile.packed["cg4"] < profile.packed["cg1"] < profile.packed["int8"]


@pytest.mark.slow
def test_measuring_says_which_slow_tiers_get_new_chunks(run, tmp_path, monkeypatch):
    measured = ("measure", "--store", tmp_path / "store")
    monkeypatch.setenv("RAGFUSE_TIERS", json.dumps([f"file://{tmp_path}/bucket"]))
    assert re.search(r"160 tokens go to (disk|objects)[.]", words_of(run(*measured)))
    monkeypatch.setenv("RAGFUSE_PLACEMENT", "all")
    assert "New chunks of 160 tokens go to disk, objects." in words_of(run(*measured))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("measure", "--tiers", "://x"), "StoreError: Wanted a folder or a URL"),
        (("measure", "--device", "abacus"), "ModelError: Wanted a device"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(run, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 1
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_store_that_is_a_file_is_refused(run, tmp_path):
    (tmp_path / "file").write_text("x")
    result = run("measure", "--store", tmp_path / "file")
    assert result.exit_code == 1
    assert "StoreError: " in result.stderr
    assert Path(tmp_path / "file").read_text() == "x"
