"""A picture of distance to full prefill against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragfuse_bench.palette import method_style

from ragfuse.calibration.plots import model_in_title, saved
from ragfuse.errors import SettingsError

NO_FRONTIER = (
    "--plot shows KL relative to plain reuse: the methods must include `none` and at least one"
    " policy."
)


def plot_frontier(result: Mapping[str, Any], path: Path) -> None:
    """Draw distance to full prefill against speed as a picture: one panel per data set, one line
    per policy.

    Full prefill and prefix caching are not drawn, as they are exact.

    Raises:
        SettingsError: Nothing is left to draw.
    """
    drawn = [
        row
        for row in result["results"]
        if row.get("kl_over_reuse") and row["method"] not in ("full", "prefix")
    ]
    if not drawn:
        raise SettingsError(NO_FRONTIER)
    sets = list(dict.fromkeys(row["dataset"] for row in drawn))
    names = dict.fromkeys(row["method"] for row in drawn)
    styles = {method: method_style(method, at) for at, method in enumerate(names)}
    with saved(path, (7.5, 5.0 * len(sets))) as figure:
        for at, dataset in enumerate(sets):
            axes = figure.add_subplot(len(sets), 1, at + 1)
            _frontier(axes, [row for row in drawn if row["dataset"] == dataset], styles)
            axes.legend(fontsize=8)
        model = model_in_title(result["model"])
        figure.axes[0].set_title(
            f"{model}, {result['dtype']}, threads: {result['threads']} (lower right is better)"
        )


def _frontier(
    axes: Any, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, tuple[str, str, str]]
) -> None:
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    for method, (label, color, mark) in styles.items():
        points = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: row["ratio"] or 0
        )
        if not points:
            continue
        x, y = [row["ttft_x"] for row in points], [row["kl_over_reuse"] for row in points]
        axes.plot(x, y, f"{mark}-", color=color, label=label, markersize=5)
        for row in points if len(points) > 1 else ():
            at = (row["ttft_x"], row["kl_over_reuse"])
            axes.annotate(
                f"{row['ratio']:.0%}",
                at,
                (4, 4),
                textcoords="offset points",
                fontsize=7,
                color=color,
            )
    found = [row["kl_over_reuse"] for row in rows]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(max(0.005, 0.8 * min(found)), max(1.3, 1.2 * max(found)))
    axes.set_xlabel("first token, times faster than full prefill")
    axes.set_ylabel(
        f"KL to full prefill, plain reuse = 1 ({rows[0]['dataset']}, n = {rows[0]['n']})"
    )
    axes.grid(True, alpha=0.3)
