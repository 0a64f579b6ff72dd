"""Rows of measurements as results: one line for each data set, method and ratio, with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from ragfuse_bench.quality.scored import ScoredRow
from ragfuse_bench.scores import difference_interval
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.comparison import prefill_speedup
from ragfuse.calibration.stats import mean_interval, ratio_interval

FULL_PREFILL = ("full", 1.0)
REUSE = ("none", 0.0)
"""Method and ratio of the two that the others are held against: chunks encoded alone, nothing
recomputed.
"""


def results_of(rows: Sequence[ScoredRow]) -> list[dict[str, Any]]:
    """For each data set, method and ratio: n, the means, their 95% intervals, and the difference to
    full prefill.

    kl_over_reuse is there where plain reuse was measured on the same questions.
    """
    groups: dict[tuple[str, str, float | None], dict[str, ScoredRow]] = defaultdict(dict)
    for row in rows:
        groups[row.by][row.case] = row
    return [_result(groups, key) for key in groups]


def mean_of(rows: Sequence[ScoredRow], name: str) -> float | None:
    """Return the mean of a column; None where a row lacks it."""
    values = [getattr(row, name) for row in rows]
    return None if any(value is None for value in values) else float(mean(values))


def _result(
    groups: Mapping[tuple[str, str, float | None], Mapping[str, ScoredRow]], key: Any
) -> dict[str, Any]:
    dataset, method, ratio = key
    mine = groups[key]
    rows = list(mine.values())
    kls = [row.kl for row in rows if row.kl is not None]
    summary = rows[0].task == "summary"
    score, low_high = mean_of(rows, "score"), None
    said: dict[str, Any] = {
        "dataset": dataset,
        "method": method,
        "ratio": ratio,
        "n": len(rows),
    }
    if score is not None:
        scores = [row.score or 0.0 for row in rows]
        low_high = list(mean_interval(scores))
        full = [groups[dataset, *FULL_PREFILL][row.case] for row in rows]
        said["to_full"] = score - (mean_of(full, "score") or 0)
        said["to_full_ci"] = list(difference_interval(scores, [row.score or 0.0 for row in full]))
    said |= {
        "f1": None if summary else score,
        "f1_ci": None if summary else low_high,
        "em": None if summary else mean_of(rows, "em"),
        "rouge_l": score if summary else None,
        "rouge_l_ci": low_high if summary else None,
        "kl": mean_of(rows, "kl"),
        "kl_ci": list(mean_interval(kls)) if kls else None,
        "top1": mean_of(rows, "top1"),
        "identical": mean_of(rows, "identical"),
        "ttft_x": prefill_speedup(rows),
        "mean_ratio": mean_of(rows, "mean_ratio"),
        "tokens": mean_of(rows, "tokens"),
    }
    reuse = groups.get((dataset, *REUSE), {})
    both = [(mine[case].kl, reuse[case].kl) for case in mine if case in reuse]
    ours, theirs = [a for a, _ in both if a is not None], [b for _, b in both if b is not None]
    if ours and len(ours) == len(theirs) and sum(theirs) > 0:
        said["kl_over_reuse"] = sum(ours) / sum(theirs)
        said["kl_over_reuse_ci"] = list(ratio_interval(ours, theirs))
    return said


def show_quality(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One table for each data set: the columns of docs/quality.md; - full is the interval of the
    difference to it.
    """
    for dataset in dict.fromkeys(result["dataset"] for result in results):
        mine = [result for result in results if result["dataset"] == dataset]
        summary = mine[0]["rouge_l"] is not None
        title = (
            f"{dataset}: {mine[0]['n']} questions, {mine[0]['tokens']:,.0f} prompt tokens on"
            " average"
        )
        table = Table(title=title, box=None)
        score = "ROUGE-L" if summary else "F1"
        for name in (
            "method",
            "",
            score,
            "95% of - full",
            "KL",
            "of reuse's",
            "top-1",
            "same",
            "TTFT",
        ):
            table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for result in mine:
            table.add_row(*_cells(result, summary))
        console.print(table)


def _cells(result: Mapping[str, Any], summary: bool) -> list[str]:
    name = "rouge_l" if summary else "f1"
    ratio = (
        ""
        if result["ratio"] is None or result["method"] in ("full", "none")
        else f"{result['ratio']:.0%}"
    )
    return [
        result["method"],
        ratio,
        _number(result[name], ".3f"),
        _range(result.get("to_full_ci")),
        _number(result["kl"], ".3f"),
        _number(result.get("kl_over_reuse"), ".3f"),
        _number(result["top1"], ".3f"),
        _number(result["identical"], ".0%"),
        f"{result['ttft_x']:.1f}x",
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:+.2f}..{interval[1]:+.2f}"
