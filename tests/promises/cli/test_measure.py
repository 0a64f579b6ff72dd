"""`ragfuse measure` as a user runs it, on a tiny model."""

import re

import pytest
from pydantic import TypeAdapter

from ragfuse.load import timings as measuring
from ragfuse.plan.cost import CostModel


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """What is measured is short."""
    own, less = measuring.measure, {"longest": 128, "rounds": 1}
    monkeypatch.setattr(
        "ragfuse.engine.model_records.measure", lambda *given, **more: own(*given, **less, **more)
    )


def test_a_machine_is_measured_shown_and_kept(run, tmp_path):
    result = run("measure", "--store", tmp_path / "store", "--json", "machine.json")
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "store") in result.output.replace("\n", "")
    assert re.search(r"int8 +[\d,.]+ +0\.\d", result.output)
    profile = TypeAdapter(CostModel).validate_json((tmp_path / "machine.json").read_text())
    assert set(profile.tiers) == {"memory", "disk"}
    assert (set(profile.decode), set(profile.packed)) == ({"int8"}, {"int8"})
    assert 0.1 < profile.packed["int8"] < 0.6
    assert not list(tmp_path.rglob("measure-*"))
