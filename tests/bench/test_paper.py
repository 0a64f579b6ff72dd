"""Every figure of the paper runs on a tiny model, prints its table and draws its picture."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench import paper, storage
from ragfuse_bench.figure import Wanted
from ragfuse_bench.paper import FIGURES, run_paper
from rich.console import Console

from ragfuse import Settings
from ragfuse.errors import SettingsError
from tests.bench.kit import drawn
from tests.tiny import CHUNKS


@pytest.fixture
def wanted(varied_path: Path, tmp_path: Path) -> Wanted:
    texts = [{"title": "", "text": chunk} for chunk in CHUNKS[:3]]
    rows = [{"id": i, "question": f"Who is {i}?", "answers": ["x"], "ctxs": texts} for i in range(2)]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = Settings(model=str(varied_path), dtype="float32", home=tmp_path)
    return Wanted(settings, (str(path),), 2, 0, None, Console(file=io.StringIO(), width=200))


def run(name: str, wanted: Wanted, tmp_path: Path) -> dict[str, Any]:
    return drawn(name, FIGURES[name].title, wanted, tmp_path)


def test_attention_deviation_falls_to_nothing_with_the_ratio(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("fig6", wanted, tmp_path)["rows"]
    for policy in ("hkvd", "random"):
        mine = {row["ratio"]: row["of_reuse"] for row in rows if row["method"] == policy}
        assert mine[0.0] == pytest.approx(1.0)
        assert mine[1.0] == pytest.approx(0.0, abs=1e-3)
        assert mine[0.5] < 1.0


def test_the_first_tokens_hold_most_of_the_deviation(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("fig7", wanted, tmp_path)["rows"]
    for layer in {row["layer"] for row in rows}:
        mine = [row for row in rows if row["layer"] == layer]
        assert [row["deviation"] for row in mine] == sorted((row["deviation"] for row in mine), reverse=True)
        assert all(row["holds"] >= row["share"] for row in mine)


def test_every_pair_of_layers_is_correlated(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("fig8", wanted, tmp_path)["rows"]
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(-1 <= row["correlation"] <= 1 and row["n"] == 2 for row in rows)


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("fig12", ["full", "prefix", "none", "hkvd@alone", "query"]),
        pytest.param("fig13", ["full", "hkvd@alone", "query", "mapreduce", "maprerank"], marks=pytest.mark.slow),
        pytest.param("fig16", ["full", "none", *["hkvd@alone"] * 6, *["lexical"] * 6], marks=pytest.mark.slow),
    ],
)
def test_quality_stands_beside_speed(wanted: Wanted, tmp_path: Path, name: str, methods: list[str]) -> None:
    rows = run(name, wanted, tmp_path)["rows"]
    assert [row["method"] for row in rows] == methods
    assert all(row["n"] == 2 and row["score"] is not None and row["ttft_x"] > 0 for row in rows)
    assert all(row["kl"] is None for row in rows if row["method"].startswith("map"))


@pytest.mark.slow
def test_sizes_are_measured_by_number_and_by_length(wanted: Wanted, tmp_path: Path, monkeypatch: Any) -> None:
    real, asked = paper.run_ttft, []

    def small(options: Any, console: Any) -> Any:
        asked.append((options.chunks, options.chunk_tokens, options.rounds))
        return real(
            paper.TtftOptions(**{**vars(options), "chunk_tokens": options.chunk_tokens // 30, "rounds": 1}), console
        )

    monkeypatch.setattr(paper, "run_ttft", small)
    rows = run("fig15", wanted, tmp_path)["rows"]
    assert len(rows) == len(asked) == len({(row["chunks"], row["chunk_tokens"]) for row in rows}) == 7
    assert all(row["fused_s"] > 0 and row["full_s"] >= row["prefix_s"] for row in rows)
    assert {rounds for *_, rounds in asked} == {3}
    asked.clear()
    rows = run("fig15", replace(wanted, quick=True), tmp_path)["rows"]
    assert len(rows) == len(asked) == 4
    assert all(rounds == 1 and chunks[0] * tokens <= 4000 for chunks, tokens, rounds in asked)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TOKENS", 32)
    monkeypatch.setattr(storage, "CHUNKS", 3)
    monkeypatch.setattr(storage, "DEVICES", {"disk": 0.0, "objects 100 MB/s": 100.0, "objects 1 MB/s": 1.0})


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_every_device_has_the_controller_s_ratio_and_one_is_taken(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("fig10", replace(wanted, quick=True), tmp_path)["rows"]
    devices = list(dict.fromkeys(row["device"] for row in rows))
    assert devices == ["memory", *storage.DEVICES]
    for device in devices:
        mine = [row for row in rows if row["device"] == device]
        assert sum(row["taken"] in ("ratio", "both") for row in mine) == 1
        assert [row["ratio"] for row in mine] == sorted({0.15, 0.3, 0.5} | {row["ratio"] for row in mine})
        assert all(row["ttft_s"] > 0 and row["predicted_s"] >= row["fuse_s"] > 0 for row in mine)
    assert sum(row["taken"] in ("device", "both") for row in rows) == 1
    loads = [next(row["load_s"] for row in rows if row["device"] == device) for device in devices]
    assert loads[-1] > max(loads[:-1])


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_every_method_is_timed_on_every_device_beside_its_score(wanted: Wanted, tmp_path: Path) -> None:
    rows = run("fig17", replace(wanted, quick=True), tmp_path)["rows"]
    methods = ["full", "prefix", "none", "hkvd@alone", "hkvd"]
    assert [(row["device"], row["method"]) for row in rows] == [(d, m) for d in storage.SLOWER for m in methods]
    assert all(row["ttft_s"] > 0 and row["score"] is not None for row in rows)
    assert all(row["ttft_x"] == 1.0 for row in rows if row["method"] == "full")


def test_a_figure_that_there_is_not_is_named(wanted: Wanted) -> None:
    with pytest.raises(SettingsError, match="fig99"):
        run_paper("fig99", wanted, None)
