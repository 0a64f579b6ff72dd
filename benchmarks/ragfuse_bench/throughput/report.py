"""A measured throughput as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = (("full", "full recompute"), ("prefix", "prefix caching"), ("ragfuse", "ragfuse"))


def show_throughput(result: Mapping[str, Any], console: Console) -> None:
    """The result as a table and in words."""
    table = Table("way", title="Time to the first token under load", box=None)
    for heading in ("requests/s", "n", "mean s", "95% s", "lost"):
        table.add_column(heading, justify="right")
    for name, words in NAMES:
        told = result["methods"][name]
        table.add_row(words, "none", "", f"{told['alone_s']:.3f}", "", "")
        for load in told["loads"]:
            times = (_seconds(load["mean_s"]), _seconds(load["p95_s"]))
            table.add_row("", f"{load['rate']:.2f}", str(load["n"]), *times, str(load["lost"]))
    console.print(table)
    for line in _words(result):
        console.print(line, highlight=False)


def _words(result: Mapping[str, Any]) -> list[str]:
    rates = result["rates"]
    said = ", ".join(
        f"{words} {'at least ' if rates[name]['at_least'] else ''}{rates[name]['rate']:.2f}"
        for name, words in NAMES
    )
    batch = result["batch"]
    lines = [
        (
            f"Requests a second with a first token in {result['at_ttft_s']:.2f} s on average:"
            f" {said}. That is {_factor(result['rate_x_vs_full'])} full recompute's rate and"
            f" {_factor(result['rate_x_vs_prefix'])} prefix caching's."
        ),
        (
            f"Answers together: {batch['together']:.1f} tokens a second, one by one"
            f" {batch['alone']:.1f}: {result['batch_x']:.2f}x."
        ),
        f"Lost requests: {result['lost']}.",
    ]
    wrong = [
        each
        for told in result["methods"].values()
        for load in told["loads"]
        for each in load["wrong"]
    ]
    return lines + ([f"What went wrong: {wrong[0]}"] if wrong else [])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _factor(value: float | None) -> str:
    return "an unknown number of times" if value is None else f"{value:.2f} times"
