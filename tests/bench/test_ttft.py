"""The whole benchmark on a tiny model: what it reports, how, and what it leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench import ttft
from ragfuse_bench.options import TtftOptions
from ragfuse_bench.rounds import Runner, Times
from ragfuse_bench.ttft import run_ttft
from rich.console import Console

from ragfuse.calibration.runner import Sample

KEYS = {
    "speedup", "efficiency", "ideal_speedup", "ideal_prefix_aware", "full_s", "fused_s", "reuse_x", "prefix_x",
    "by_chunks", "rounds", "machine", "versions", "malloc", "ratio_counts", "mean_ratio", "cases", "clock", "date",
}  # fmt: skip


def run(home: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"chunks": (3,), "chunk_tokens": 24, "question_tokens": 8, "rounds": 2}
    options = TtftOptions(model="tiny", dtype="float32", home=home, **{**given, **changes})
    return run_ttft(options, Console(quiet=True))


def test_a_run_has_the_promised_figures(tmp_path: Path) -> None:
    result = run(tmp_path, chunks=(2, 6), ratio=0.5)
    assert json.loads(json.dumps(result["by_chunks"])) == result["by_chunks"]
    assert set(result) >= KEYS
    assert [(row["chunks"], row["tokens"]) for row in result["by_chunks"]] == [(2, 56), (6, 152)]
    # six chunks are the headline
    assert (result["speedup"], result["tokens"]) == (result["by_chunks"][1]["speedup"], 152)
    assert result["efficiency"] == pytest.approx(result["speedup"] / result["ideal_speedup"])
    assert result["mean_ratio"] == pytest.approx(0.5, abs=0.07)
    assert "exact prefix" in result["ratio_counts"]


@pytest.mark.parametrize("kv", ["memory", "disk"])
def test_lego_takes_the_first_tokens_of_every_chunk_and_leaves_no_files(
    tmp_path: Path, kv: str
) -> None:
    result = run(tmp_path, policy="lego", lego_tokens=6, kv=kv)
    assert result["policy"] == "lego-6"
    assert result["mean_ratio"] == pytest.approx(6 / 24)
    assert list(tmp_path.iterdir()) == []


def test_prefix_caching_is_never_reported_slower_than_full_prefill() -> None:
    def times(*seconds: float) -> Times:
        return Times(tuple(Sample(s, s) for s in seconds), "cpu")

    work = ttft.Work(layers=4, chunks=3, chunk_tokens=24, suffix=8, ratio=0.15)
    cases = {"full": times(2, 2, 2), "fused": times(1, 1, 1), "reuse": times(1, 1, 1)}
    slower = ttft._figures({**cases, "prefix": times(4, 4, 1)}, work, 0.15)
    assert (slower["prefix_x"], slower["prefix_measured_x"]) == (1.0, 0.5)
    gains = ttft._figures({**cases, "prefix": times(1, 1, 4)}, work, 0.15)
    assert (gains["prefix_x"], gains["prefix_measured_x"]) == (2.0, 2.0)


def test_all_ways_run_the_same_prompt_and_reuse_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: dict[str, Any] = {}

    def watched(self: Runner, cases: Any, what: str = "") -> dict[str, Times]:
        traces.update({name: case() for name, case in cases.items()})
        return measure(self, cases, what)

    measure = Runner.measure
    monkeypatch.setattr(Runner, "measure", watched)
    run(tmp_path, ratio=0.5)
    assert len({tuple(getattr(t, "prefill", t).token_ids) for t in traces.values()}) == 1
    assert "full prefill" in traces["full"].plan.fallback_reason
    assert len(traces["fused"].plan.fetches) == len(traces["reuse"].plan.fetches) == 3
    assert traces["fused"].prefill.mean_ratio == pytest.approx(0.5, abs=0.07)
    assert traces["reuse"].prefill.mean_ratio == 0
    full, prefix = traces["full"].prefill.logits, traces["prefix"].logits
    assert float((full - prefix).abs().max()) < 1e-4
