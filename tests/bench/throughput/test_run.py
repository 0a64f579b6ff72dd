"""The benchmark of throughput on a tiny model over a real server, and what its figures are
made of.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragfuse_bench.options import ThroughputOptions
from ragfuse_bench.throughput.asked import each_once
from ragfuse_bench.throughput.run import (
    COMPARED_TTFT,
    METHODS,
    Measured,
    _Bench,
    _cases,
    better,
    compared,
    rate_at,
    run_throughput,
)
from ragfuse_bench.throughput.served import serving
from rich.console import Console

from ragfuse import Settings
from tests.kits.tiny import CHUNKS

pytest.importorskip("uvicorn", reason="the server's extra is not installed")
TINY = {
    "cases": 2,
    "answer_tokens": 3,
    "shares": (0.5, 0.9),
    "seconds": 4.0,
    "together": 2,
    "together_tokens": 4,
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of two questions over eight passages each."""
    file = tmp_path_factory.mktemp("data") / "musique_few.jsonl"
    rows = [
        {
            "id": name,
            "question": f"Which door of the {name} lighthouse is green?",
            "answers": ["its own"],
            "ctxs": [
                {"title": name, "text": f"{text} {name}"}
                for text in (*CHUNKS, "Nobody came.", "It rained.")
            ],
        }
        for name in ("northern", "southern")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def settings(tiny_path: Path, tmp_path: Path) -> Settings:
    return Settings(
        model=str(tiny_path),
        dtype="float32",
        home=tmp_path,
        store=tmp_path / "store",
        memory_bytes=64 << 20,
    )


def servers() -> list[int]:
    """Servers that were started from here and run."""
    return [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if "serve" in child.cmdline()
    ]


@pytest.mark.slow
def test_a_tiny_load_has_the_wanted_keys_and_loses_nothing(settings, questions):
    options = ThroughputOptions(sets=(str(questions),), **TINY)
    result = run_throughput(settings, options, Console(quiet=True))
    assert {"rate_x_vs_full", "rate_x_vs_prefix", "batch_x", "curve", "lost"} <= set(result)
    assert result["lost"] == 0
    rates = [row["rate"] for row in result["curve"]]
    assert rates == sorted(rates)
    for name in ("full", "ragfuse"):
        assert len([row for row in result["curve"] if row[name] is not None]) == 2
        assert [load["n"] > 0 for load in result["methods"][name]["loads"]] == [True, True]
    assert result["batch_x"] > 0
    assert result["machine"]["cores"]
    json.dumps(result)
    assert servers() == []


@pytest.mark.slow
def test_each_method_reuses_what_it_is_said_to(settings, questions):
    options = ThroughputOptions(sets=(str(questions),), **TINY)
    cases = _cases(settings, options)
    seen = {}
    for name, (_, told) in METHODS.items():
        with serving(settings, 1, 60.0, **told) as server:
            bench = _Bench(server, name, Path(settings.model).name, cases, options, None)  # type: ignore[arg-type]
            bodies = bench._bodies(each_once(cases[:1], 0))
            for body in (*bodies, *bodies, *bodies):
                url = "http://{}:{}/v1/chat/completions".format(*server.place)
                seen[name] = httpx.post(url, json=body, timeout=60).json()["ragfuse"]
                bench._settle()
    assert seen["full"]["tokens_reused"] == 0
    assert (
        seen["prefix"]["tokens_reused"]
        == seen["prefix"]["tokens_prefix"]
        > 0
        == seen["prefix"]["tokens_chunks"]
    )
    assert all(
        segment["hit"] for segment in seen["ragfuse"]["segments"] if segment["kind"] == "chunk"
    )
    assert seen["ragfuse"]["tokens_reused"] > 0


def slow_rate(curve, ttft_s):
    """Looked for in small steps, on straight lines between the points."""
    points, best = sorted(curve), 0.0
    for (low, early), (high, late) in pairwise(points):
        for step in range(1001):
            rate = low + (high - low) * step / 1000
            if early + (late - early) * step / 1000 <= ttft_s:
                best = max(best, rate)
    return best


CURVES = st.lists(
    st.tuples(st.integers(0, 50), st.floats(0.1, 9)),
    min_size=1,
    max_size=6,
    unique_by=lambda p: p[0],
)


@given(CURVES, st.floats(0.1, 9))
def test_the_rate_at_a_time_is_the_highest_that_takes_no_longer(curve, ttft_s):
    rate, bound = rate_at(curve, ttft_s)
    last = sorted(curve)[-1]
    assert bound == (last[1] <= ttft_s)
    if bound:
        assert rate == last[0]
    else:
        assert rate == pytest.approx(slow_rate(curve, ttft_s), abs=0.06)


def loads(*points: tuple[float, float]):
    return [
        {"rate": rate, "n": 9, "lost": 0, "mean_s": mean, "p95_s": 2 * mean, "wrong": []}
        for rate, mean in points
    ]


def test_methods_are_compared_where_full_recompute_takes_twice_its_time_without_load():
    found = {
        "full": Measured(1.0, 1.0, loads((0.5, 1.5), (0.9, 2.5))),
        "prefix": Measured(0.8, 1.2, loads((0.5, 1.0), (1.2, 2.4))),
        "ragfuse": Measured(0.2, 4.0, loads((2.0, 0.4), (3.6, 1.2))),
    }
    result = compared(found)
    assert result["at_ttft_s"] == COMPARED_TTFT * 1.0
    assert result["rates"]["full"]["rate"] == pytest.approx(0.7)
    assert result["rates"]["prefix"]["rate"] == pytest.approx(1.0)
    assert result["rates"]["ragfuse"] == {"rate": 3.6, "at_least": True}
    assert result["rate_x_vs_full"] == pytest.approx(3.6 / 0.7)
    assert result["rate_x_vs_prefix"] == pytest.approx(3.6)
    assert better(found["prefix"], found["full"]) is found["prefix"]
    assert better(Measured(1.1, 1.0, ()), found["full"]) is found["full"]
