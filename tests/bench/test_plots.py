"""Pictures of quality runs."""

from pathlib import Path
from typing import Any

import pytest
from ragfuse_bench.plots import plot_frontier

pytest.importorskip("matplotlib")


def result(*methods: tuple[str, float, float]) -> dict[str, Any]:
    rows = [
        {
            "dataset": name,
            "method": method,
            "ratio": ratio,
            "n": 9,
            "ttft_x": 5 - 4 * ratio,
            "kl_over_reuse": kl,
        }
        for name in ("one", "two")
        for method, ratio, kl in methods
    ]
    return {"results": rows, "model": "m", "dtype": "bfloat16", "threads": 1}


def test_the_frontier_is_drawn_whole_or_not_at_all(tmp_path: Path) -> None:
    found = result(
        ("none", 0.0, 1.0), ("hkvd", 0.15, 0.1), ("hkvd", 0.05, 2.2), ("prefix", 0.0, 1e-6)
    )
    found["results"].pop(0)  # in one of the panels a method is missing
    plot_frontier(found, tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
