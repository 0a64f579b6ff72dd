"""The streams' result for people: a table, time to the first token by bandwidth, and one stream over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from ragfuse.calibration.plots import model_in_title, saved

STYLES = MappingProxyType(
    {"text": ("tab:grey", "o:"), "int8": ("tab:blue", "s--"), "fixed": ("tab:green", "^-."), "adaptive": ("C1", "o-")}
)
COLORS = MappingProxyType(
    {"raw": "#08306b", "int8": "#2171b5", "cg1": "#41ab5d", "cg2": "#a1d99b", "cg3": "#fdae6b", "cg4": "#e6550d"}
)
TEXT_COLOR = "#bdbdbd"


def show(result: Mapping[str, Any], console: Console) -> None:
    """A row for each method and deadline."""
    model = model_in_title(result["model"])
    told = f"{result['traces']} lines, {result['pieces']} pieces of {result['tokens'][0]} tokens, {model}"
    table = Table(title=f"Questions that were late ({told})")
    for name in ("deadline s", "method", "late", "first token s", "KL", "top-1", "F1"):
        table.add_column(name, justify="right")
    for each in result["deadlines"]:
        for method, late in each["violations"].items():
            figures = (f"{late:.0%}", f"{each['ttft_s'][method]:.2f}", f"{each['kl'][method]:.4f}")
            worth = (f"{each['top1'][method]:.3f}", f"{each['f1'][method]:.3f}")
            name = f"{method} ({result['fixed']})" if method == "fixed" else method
            table.add_row(f"{each['deadline_s']:.2f}", name, *figures, *worth)
    console.print(table)
    if result["ttft_x_vs_text"]:
        console.print(
            f"At the equivalent of 3 Gbit/s, {result['fixed']} gives the first token {result['ttft_x_vs_text']:.1f} "
            f"times faster than text and {result['ttft_x_vs_int8']:.1f} times faster than 8 bits.",
            highlight=False,
        )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Both pictures: `path`, and beside it one with -timeline in its name."""
    if result["curve"]:
        _draw_curve(result, path)
    _draw_timeline(result, path.with_name(f"{path.stem}-timeline{path.suffix}"))


def _draw_curve(result: Mapping[str, Any], path: Path) -> None:
    """Time to the first token against bandwidth, in the paper's Gbit/s."""
    rows = result["curve"]
    with saved(path, (7, 4.5)) as figure:
        axes = figure.add_subplot()
        for method, (color, style) in STYLES.items():
            label = f"{method} ({result['fixed']})" if method == "fixed" else method
            seconds = [row[f"{method}_s"] for row in rows]
            axes.plot([row["gbps"] for row in rows], seconds, style, color=color, label=label)
        axes.axhline(result["deadlines"][0]["deadline_s"], color="black", linewidth=0.8, label="adaptive's deadline")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bandwidth (Gbit/s, scaled as the result says)")
        axes.set_ylabel("seconds to the first token")
        axes.set_title(f"{model_in_title(result['model'])}, {result['tokens'][0]} tokens")
        axes.grid(True, alpha=0.3)
        axes.legend()


def _draw_timeline(result: Mapping[str, Any], path: Path) -> None:
    """What came when over a line that falls and comes back; what is computed, behind it."""
    told = result["timeline"]
    with saved(path, (8, 4.5)) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        end = max(stream["ttft_s"] for stream in told["streams"].values())
        times = [at for at, _ in told["bytes_per_s"]] + [end]
        rates = [rate / 1e6 for _, rate in told["bytes_per_s"]]
        above.step(times, [*rates, rates[-1]], where="post", color="black")
        above.set_ylabel("line (MB/s)")
        for row, stream in enumerate(told["streams"].values()):
            for piece in stream["pieces"]:
                color = COLORS.get(piece["level"], TEXT_COLOR)
                below.barh(row, piece["seconds"], left=piece["began_s"], color=color, edgecolor="white", height=0.6)
            arrived = max((piece["began_s"] + piece["seconds"] for piece in stream["pieces"]), default=0.0)
            below.barh(row, stream["ttft_s"] - arrived, left=arrived, color=TEXT_COLOR, height=0.3)
        below.set_yticks(range(len(told["streams"])), list(told["streams"]))
        for axes in (above, below):
            axes.axvline(told["deadline_s"], color="tab:red", linewidth=0.8)
        below.set_xlabel("seconds (red: the deadline; grey: computing)")
        found = {piece["level"] for stream in told["streams"].values() for piece in stream["pieces"]} & COLORS.keys()
        handles = [below.barh(0, 0, color=COLORS[level], label=level) for level in COLORS if level in found]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), fontsize=8)
