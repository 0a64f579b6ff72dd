"""Figure 14 of the CacheBlend paper: time to the first token against the rate of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragfuse_bench.figure import Figure, Rows, Wanted, shown
from ragfuse_bench.options import ThroughputOptions
from ragfuse_bench.throughput.report import draw_curves
from ragfuse_bench.throughput.run import measured_throughput
from ragfuse_bench.throughput.served import require_server

COMMAND = "throughput"


def options_of(wanted: Wanted) -> ThroughputOptions:
    """What a figure is measured with: its rates, and no load that goes on."""
    usual = ThroughputOptions(sets=wanted.sets, chunk_tokens=wanted.chunk_tokens, minutes=0.0)
    options = replace(usual, cases=min(wanted.limit or usual.cases, usual.cases))
    return options.quick() if wanted.quick else options


def _under_load(wanted: Wanted) -> Rows:
    source = FIG14.source(wanted)
    if source is not None:
        return shown(source, COMMAND, _rows)
    require_server(wanted.settings)
    return _rows(measured_throughput(wanted.settings, options_of(wanted), wanted.console))


def _rows(result: Mapping[str, Any]) -> Rows:
    rows: Rows = []
    for name, told in result["methods"].items():
        rows.append({"method": name, "rate": 0.0, "mean_s": told["alone_s"], "p95_s": None, "n": None, "lost": None})
        for load in told["loads"]:
            rows.append({"method": name, **{key: load[key] for key in ("rate", "mean_s", "p95_s", "n", "lost")}})
    return rows


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(row["method"] for row in rows))
    alone = {row["method"]: row["mean_s"] for row in rows if not row["rate"]}
    loaded = [row for row in rows if row["rate"] and row["mean_s"] is not None]
    curve = [
        {
            "rate": row["rate"],
            **{name: row["mean_s"] if row["method"] == name else None for name in names},
            "p95": {name: row["p95_s"] if row["method"] == name else None for name in names},
        }
        for row in sorted(loaded, key=lambda row: float(row["rate"]))
    ]
    draw_curves(axes, curve, alone)


FIG14 = Figure(
    "time to the first token against the rate of requests",
    "at the same time to the first token up to 5x the rate of full recompute and 3.3x that of prefix caching (Musique "
    "and 2WikiMQA with more wordings of their questions, six chunks, three models).",
    _under_load,
    ("method", "rate", "n", "mean_s", "p95_s", "lost"),
    _draw,
    given=lambda wanted: f"{options_of(wanted).cases} questions in other words, their passages in a random order",
    shows=COMMAND,
    known_by="methods",
)
