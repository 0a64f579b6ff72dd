"""The streams' result for people: a table, time to the first token by bandwidth, and one stream
over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ragfuse.calibration.plots import model_in_title


def show(result: Mapping[str, Any], console: Console) -> None:
    """A row for each method and deadline."""
    model = model_in_title(result["model"])
    told = (
        f"{result['traces']} lines, {result['pieces']} pieces of {result['tokens'][0]} tokens,"
        f" {model}"
    )
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
            f"At the equivalent of 3 Gbit/s, {result['fixed']} gives the first token"
            f" {result['ttft_x_vs_text']:.1f} times faster than text and"
            f" {result['ttft_x_vs_int8']:.1f} times faster than 8 bits.",
            highlight=False,
        )
