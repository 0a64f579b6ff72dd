"""The harness on a tiny model: exact where it must be, resumable, and every figure as worked out by
hand.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.options import QualityOptions
from ragfuse_bench.quality import run
from ragfuse_bench.quality.methods import QualityLab, methods_of
from ragfuse_bench.quality.report import run_quality
from ragfuse_bench.quality.scored import ScoredRow
from ragfuse_bench.quality.table import results_of
from rich.console import Console

from ragfuse import Settings
from ragfuse.calibration.case import Case
from ragfuse.hf.model import HFModel
from ragfuse.models.loader import load_model
from tests.kits.tiny import CHUNKS

TEXTS = tuple(f"{chunk} {chunk[::-1]}" for chunk in CHUNKS)
CASE = Case("made", "1", "Who counted?", ("forty",), TEXTS[:4])


@pytest.fixture(scope="module")
def model(varied_path: Path) -> HFModel:
    return load_model(varied_path, "float32")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [
        {
            "id": i,
            "question": f"Who is {i}?",
            "answers": ["x"],
            "ctxs": [{"title": "", "text": t} for t in TEXTS[i : i + 3]],
        }
        for i in range(3)
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def asked(
    model: HFModel, names: tuple[str, ...], ratio: float, case: Case = CASE
) -> dict[str, ScoredRow]:
    lab = QualityLab(model)
    stopwatch = run.Stopwatch(model.device)
    methods = methods_of(names, (ratio,), model)
    rows = {row.method: row for row in run.ask(lab, stopwatch, case, methods, answers=True)}
    lab.close()
    return rows


@pytest.mark.slow
def test_every_method_recomputing_all_is_full_prefill(model: HFModel) -> None:
    rows = asked(model, ("full", "prefix", "hkvd", "hkvd@alone", "lego"), 1.0)
    assert len(rows) == 5
    for name, row in rows.items():
        assert row.kl < 1e-6, name
        assert row.top1 == 1.0
        assert row.identical, name


def row(case: str, method: str, ratio: float, **given: Any) -> ScoredRow:
    times = {"cpu_s": 1.0, "wall_s": 1.0, "full_cpu_s": 4.0, "full_wall_s": 4.0}
    common = {"tokens": 100, **times, "kl": 0.0, "top1": 1.0}
    return ScoredRow("set", case, method, ratio, **{**common, **given})


def test_results_are_worked_out_as_by_hand() -> None:
    rows = [
        row("a", "full", 1.0, score=1.0, em=1.0, identical=True, cpu_s=4.0),
        row("b", "full", 1.0, score=0.5, em=0.0, identical=True, cpu_s=4.0),
        row("a", "none", 0.0, score=0.0, em=0.0, identical=False, kl=1.0, top1=0.5),
        row("b", "none", 0.0, score=0.5, em=0.0, identical=True, kl=3.0, top1=0.7),
        row("a", "hkvd", 0.15, score=1.0, em=1.0, identical=True, kl=0.1, cpu_s=2.0),
        row("b", "hkvd", 0.15, score=0.25, em=0.0, identical=False, kl=0.5, cpu_s=2.0),
    ]
    full, none, hkvd = results_of(rows)
    for found, wanted in (
        (full, {"f1": 0.75, "em": 0.5, "to_full": 0.0, "kl": 0.0, "ttft_x": 1.0}),
        (none, {"kl_over_reuse": 1.0, "kl": 2.0, "top1": pytest.approx(0.6), "n": 2}),
        (hkvd, {"f1": 0.625, "to_full": -0.125, "to_full_ci": [-0.25, 0.0]}),
        (hkvd, {"kl_over_reuse": pytest.approx(0.15), "ttft_x": 2.0, "identical": 0.5}),
    ):
        assert {name: found[name] for name in wanted} == wanted


def test_the_whole_command_gives_plain_json(varied_path: Path, file: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    options = QualityOptions((str(file),), ("full", "none", "auto"), ())
    result = run_quality(settings, options, Console(quiet=True))
    assert json.loads(json.dumps(result)) == result
    keys = {"dataset", "method", "ratio", "n", "f1", "f1_ci", "kl", "top1", "identical", "ttft_x"}
    assert all(keys <= set(each) for each in result["results"])
    assert result["default"] == {"method": "query", "ratio": 0.1}  # nothing is known of this model
    assert [each["method"] for each in result["results"]] == ["full", "none", "query"]
    assert "adapter" not in result
    assert result["options"]["sets"] == ["made"]  # no folder of somebody's machine
