"""The whole benchmark on a tiny model: what it reports, how, and what it leaves behind."""

import io
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


def small(home: Path, **changes: Any) -> TtftOptions:
    given: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float32",
        "chunk_tokens": 24,
        "question_tokens": 8,
    }
    return TtftOptions(**{**given, "chunks": (3,), "rounds": 2, "home": home, **changes})


def run(options: TtftOptions) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=160)
    result = run_ttft(options, console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return run(small(tmp_path_factory.mktemp("home"), chunks=(2, 6), ratio=0.5))


def test_the_result_is_plain_json_with_the_promised_keys(found: tuple[dict[str, Any], str]) -> None:
    result, _ = found
    assert json.loads(json.dumps(result)) == json.loads(
        json.dumps(result | {"options": result["options"]})
    )
    assert set(result) >= KEYS
    for row in result["by_chunks"]:
        assert {"chunks", "tokens", "speedup"} <= set(row)


def test_every_prompt_is_listed_and_six_chunks_are_the_headline(
    found: tuple[dict[str, Any], str],
) -> None:
    result, _ = found
    assert [(row["chunks"], row["tokens"]) for row in result["by_chunks"]] == [(2, 56), (6, 152)]
    assert result["speedup"] == result["by_chunks"][1]["speedup"]
    assert result["tokens"] == 152


def test_efficiency_is_the_speedup_over_the_ideal(found: tuple[dict[str, Any], str]) -> None:
    result, _ = found
    # 4 layers; 1 in full, 3 with half of 144 context rows and 8 of the question
    assert result["ideal_speedup"] == pytest.approx(4 / (1 + 3 * (0.5 * 144 + 8) / 152))
    assert result["ideal_prefix_aware"] == pytest.approx(4 * 152 / (128 + 3 * (0.5 * 120 + 8)))
    assert result["efficiency"] == pytest.approx(result["speedup"] / result["ideal_speedup"])


def test_the_ratio_that_was_measured_is_near_the_one_asked_for(
    found: tuple[dict[str, Any], str],
) -> None:
    result, _ = found
    assert result["mean_ratio"] == pytest.approx(0.5, abs=0.07)
    assert "exact prefix" in result["ratio_counts"]


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
    run(small(tmp_path, ratio=0.5))
    assert len({tuple(getattr(t, "prefill", t).token_ids) for t in traces.values()}) == 1
    assert "full prefill" in traces["full"].plan.fallback_reason
    assert len(traces["fused"].plan.fetches) == len(traces["reuse"].plan.fetches) == 3
    assert traces["fused"].prefill.mean_ratio == pytest.approx(0.5, abs=0.07)
    assert traces["reuse"].prefill.mean_ratio == 0
    full, prefix = traces["full"].prefill.logits, traces["prefix"].logits
    assert float((full - prefix).abs().max()) < 1e-4


def test_lego_takes_the_first_tokens_of_every_chunk_and_has_its_own_ideal(tmp_path: Path) -> None:
    result, _ = run(small(tmp_path, policy="lego", lego_tokens=6))
    assert result["policy"] == "lego-6"
    assert result["mean_ratio"] == pytest.approx(6 / 24)
    assert result["ideal_speedup"] == pytest.approx(80 / (3 * 6 + 8))


def test_kv_on_disk_is_read_from_there_and_gone_afterwards(tmp_path: Path) -> None:
    result, _ = run(small(tmp_path, kv="disk"))
    assert result["options"]["kv"] == "disk"
    assert list(tmp_path.iterdir()) == []
