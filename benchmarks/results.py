"""`python -m benchmarks.results`: docs/results.md from the JSON of the runs under docs/benchmarks.

A run's JSON has the tables that the benchmark printed. Nothing is typed by hand: what a run did not
measure is not on the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
Result = Mapping[str, Any]

HEAD = """# Results

Written by `make results` from the JSON files in [benchmarks](benchmarks), which have all figures, machines and versions.
Times are CPU time unless stated otherwise. Full prefill is measured in the same run. [Quality](quality.md) defines the columns.
"""

TITLES = MappingProxyType(
    {
        "quality": "Quality",
        "calibrate": "Calibration",
        "adapt": "Adapters that encode chunks",
        "codec": "Levels of KV",
        "stream": "Streaming KV under a deadline",
        "conversation": "A growing conversation",
        "throughput": "A server under load",
        "sessions": "Conversations on one server, simulated",
        "modules": "Prompts over modules",
        "peers": "Compared with other engines",
        "engines": "Whole servers: vLLM, ragfuse, both",
        "ray": "Several processes, with Ray",
        "prefix": "Prefix caching",
        "matching": "Recognising altered passages",
        "dropin": "As a drop-in model in a chain",
        "ttft": "Time to first token, random weights",
        "kernels": "Operations of a prefill",
        "decode": "Decoding one answer",
        "load": "Reading ahead",
        "controller": "The loading controller",
    }
)
"""The headings of the page, by benchmark; `calibrate` and `adapt` are ragfuse's own commands."""
LEFT_OUT = frozenset(
    {
        "CPU",
        "disk",
        "same first token",
        "speedup over transformers",
        "of the ideal",
        "top-1 in answers",
        "idea",
    }
    | {
        "waiting",
        "theirs",
        "same chunks",
        "encode MB/s",
        "F1",
        "cpu: views",
        "accelerator: views",
        "above loaded",
    }
    | {"requests / mean", "of turns with a history", "shape, level", "turn", "n", "on disk"}
)
"""Columns that no decision needs; a table whose first column is one of them is left out. The runs'
files have them.
"""
COMPARED = (("none@filler", 0.0), ("lexical", 0.1), ("query", 0.1))
"""Methods and ratios whose distance to full prefill stands on the page."""
SENTENCES = 3
"""Of a table's title."""


def page(folder: Path) -> str:
    """Return the whole page from all runs in a folder."""
    runs = {
        path.name: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }
    parts = [HEAD]
    for benchmark, title in TITLES.items():
        mine = {name: run for name, run in runs.items() if _benchmark(run) == benchmark}
        if mine:
            parts.append(f"## {title}\n")
        if benchmark in ("quality", "calibrate"):
            rows = _quality(mine) if benchmark == "quality" else _calibrations(mine)
            parts.append("\n".join([*rows, ""]) if mine else "")
            continue
        for name, run in mine.items():
            parts.append("\n".join([*_tables(run), _where(name, run), ""]))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _benchmark(run: Result) -> str:
    if "benchmark" in run:
        return str(run["benchmark"])
    return "adapt" if "evaluations" in run else "calibrate"


def _quality(runs: Mapping[str, Result]) -> Iterator[str]:
    """One row for each run and data set."""
    rows = []
    for name, run in runs.items():
        for dataset in dict.fromkeys(each["dataset"] for each in run["results"]):
            found = {
                (each["method"], each["ratio"]): each
                for each in run["results"]
                if each["dataset"] == dataset
            }
            near = [
                _number(found.get(method, {}).get("kl_over_reuse"), ".2f") for method in COMPARED
            ]
            plain, chosen = found.get(("none", 0.0), {}), found.get(COMPARED[-1], {})
            sizes = [str(found["full", 1.0]["n"]), f"{found['full', 1.0]['tokens']:,.0f}"]
            low_high = chosen.get("to_full_ci")
            score = "" if low_high is None else f"{low_high[0]:+.2f}..{low_high[1]:+.2f}"
            last = [_number(chosen.get("top1"), ".3f"), score, _number(chosen.get("ttft_x"), ".1f")]
            rows.append([_link(name), *sizes, _number(plain.get("kl"), ".3f"), *near, *last])
    methods = [
        f"{method} {ratio:.0%}" if ratio else "nothing recomputed" for method, ratio in COMPARED
    ]
    last_three = ["query: top-1", "query: F1 - full (95%)", "query: speedup"]
    yield from _table(["run", "n", "tokens", "KL of plain reuse", *methods, *last_three], rows)


def _calibrations(runs: Mapping[str, Result]) -> Iterator[str]:
    """One row for each run: the choice, or the closest of what was tried."""
    rows = []
    for name, run in runs.items():
        best = min(
            run["tried"], key=lambda each: (each["outcome"] != "safe", each["kl_over_reuse"])
        )
        chosen = next(
            (e for e in run["tried"] if (e["policy"], e["ratio"]) == (run["policy"], run["ratio"])),
            best,
        )
        interval = f"{chosen['kl_over_reuse']:.2f} ({chosen['low']:.2f} to {chosen['high']:.2f})"
        figures = [
            interval,
            f"{chosen['top1']:.3f}",
            f"{chosen['ttft_x']:.1f}",
            f"{run['seconds'] / 60:.0f}",
        ]
        choice = [chosen["policy"], f"{chosen['ratio']:.0%}", chosen["outcome"]]
        rows.append([_link(name), str(run["questions"]), *choice, *figures])
    columns = [
        "run",
        "questions",
        "policy",
        "ratio",
        "outcome",
        "KL of reuse's (95%)",
        "top-1",
        "speedup",
        "minutes",
    ]
    yield from _table(columns, rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _tables(run: Result) -> Iterator[str]:
    if "evaluations" in run:
        kl = ", ".join(f"{each['kl']:.3f} ({each['step']})" for each in run["evaluations"])
        yield f"{run['steps']} steps in {run['seconds'] / 60:.0f} minutes. KL by step: {kl}.\n"
    for each in run.get("tables", ()):
        if not each["columns"]:
            continue
        if each["title"]:
            yield " ".join(re.split(r"(?<=[.!?:]) (?=[A-Z0-9])", each["title"])[:SENTENCES]) + "\n"
        if each["columns"][0] in LEFT_OUT:
            continue
        shown = [at for at, column in enumerate(each["columns"]) if column not in LEFT_OUT]
        yield from _table(
            [each["columns"][at] for at in shown],
            [[row[at] for at in shown] for row in each["rows"]],
        )
        yield ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * (len(columns) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _link(name: str) -> str:
    return f"[{name.removesuffix('.json')}](benchmarks/{name})"


def _where(name: str, run: Result) -> str:
    where, given = run.get("machine", {}), {**run.get("options", {}), **run}
    dtype = f" in {given['dtype']}" if "dtype" in given else ""
    device = where.get("gpu") or where.get("cpu", "")
    said = [
        f"`{given['model']}`{dtype}" if given.get("model") else "",
        (
            f"{device}, {run['threads']} thread{'s' * (run['threads'] > 1)}"
            if "threads" in run
            else device
        ),
        run.get("note", ""),
    ]
    return f"{_link(name)}: " + "; ".join(part for part in said if part) + "."


if __name__ == "__main__":
    (DOCS / "results.md").write_text(page(DOCS / "benchmarks"), "utf-8")
    print("Written: docs/results.md")
