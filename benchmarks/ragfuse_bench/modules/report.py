"""What modules are worth, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Result = Mapping[str, Any]


def show_modules(result: Result, console: Console) -> None:
    """The result as tables, and what was said each way."""
    console.print(_cases(result))
    console.print(_lengths(result))
    for row in result["cases"]:
        if not row["dataset"]:
            console.print(
                f"[bold]{row['name']}[/], all computed, then over its modules:", highlight=False
            )
            for way in ("full", "cached"):
                console.print(Text(f"  {' '.join(row[f'answer_{way}'].split())}"))


def _cases(result: Result) -> Table:
    table = Table(
        "prompt",
        title=f"First token over modules ({_clock(result)}, {result['rounds']} rounds)",
        box=None,
    )
    for heading in (
        "tokens",
        "cached",
        "full s",
        "cached s",
        "faster",
        "full",
        "over modules",
        "same",
    ):
        table.add_column(heading, justify="right")
    for row in (*(row for row in result["cases"] if not row["dataset"]), *result["by_set"]):
        name = row["name"] if "name" in row else f"{row['dataset']} (n = {row['n']})"
        times = (
            ("", "") if "full_s" not in row else (f"{row['full_s']:.3f}", f"{row['cached_s']:.3f}")
        )
        sizes = (f"{row['tokens']:,.0f}", f"{row['cached_share']:.1%}")
        table.add_row(name, *sizes, *times, f"{row['ttft_x']:.1f}x", *_scores(row))
    return table


def _scores(row: Result) -> tuple[str, str, str]:
    """Scores both ways and how often the answers are the same."""
    full, cached = (row.get(f"score_{way}") for way in ("full", "cached"))
    same = row["same"]
    told = (
        "" if full is None or cached is None else f"{full:.3f}",
        "" if cached is None else f"{cached:.3f}",
    )
    return *told, ("yes" if same else "no") if isinstance(same, bool) else f"{same:.0%}"


def _lengths(result: Result) -> Table:
    table = Table(title="First token against the length, nearly all of it cached", box=None)
    for heading in ("tokens", "cached", "full s", "cached s", "faster"):
        table.add_column(heading, justify="right")
    for row in result["slope"]:
        times = (f"{row['full_s']:.3f}", f"{row['cached_s']:.3f}", f"{row['ttft_x']:.1f}x")
        table.add_row(f"{row['tokens']:,}", f"{row['cached_share']:.1%}", *times)
    return table


def _clock(result: Result) -> str:
    return "CPU time" if result["clock"] == "cpu" else "wall time"
