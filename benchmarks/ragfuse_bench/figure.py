"""A figure of a paper, measured here: what to measure, how it is printed beside the paper's, drawn and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from ragfuse_bench.options import CONTEXT_TOKENS
from ragfuse_bench.quality.cases import set_name
from rich.console import Console
from rich.table import Table

from ragfuse.calibration.plots import saved
from ragfuse.calibration.runner import circumstances
from ragfuse.errors import InputError
from ragfuse.settings import Settings

Rows = list[dict[str, Any]]
CARRIED = ("model", "dtype", "machine", "versions", "malloc", "threads", "date")
"""What a figure says of itself as the result says that it was drawn from."""
TEXTS = (
    "dataset",
    "method",
    "device",
    "taken",
    "part",
    "grouping",
    "layers",
    "level",
    "idea",
    "coder",
    "what",
    "fastest",
)
"""Columns that hold words."""
LINE = 95
"""Characters that fit above a picture."""
WIDE = 10_000
"""Wider than any table."""


@dataclass(frozen=True)
class Wanted:
    """What to measure a figure with: data sets, questions of each (0: all), chunk size, where rows are kept.

    quick: once, and no prompt of more than four thousand tokens, where times alone are measured; every second ratio.
    context_tokens: of the contexts whose KV is coded. kept: a folder for KV that the next figure wants, too.
    """

    settings: Settings
    sets: tuple[str, ...]
    limit: int
    chunk_tokens: int
    rows: Path | None
    console: Console
    quick: bool = False
    context_tokens: int = CONTEXT_TOKENS
    kept: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of data sets, if one was named."""
        return next((Path(name) for name in self.sets if Path(name).is_dir()), None)

    @property
    def result(self) -> Path | None:
        """The file that another benchmark wrote, if one was named."""
        return next((Path(name) for name in self.sets if Path(name).is_file()), None)


def by_questions(wanted: Wanted) -> str:
    """What a figure that asks questions was measured with."""
    return f"n = {wanted.limit or 'all'} a set"


def by_random_tokens(wanted: Wanted) -> str:
    """What a figure that measures times alone was measured with."""
    return "random tokens"


def shown(path: Path, command: str, rows: Callable[[Any], Rows]) -> Rows:
    """Rows of what `ragfuse bench COMMAND` wrote; InputError with the file's name where it is something else."""
    try:
        return rows(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"'{path}' is not what `ragfuse bench {command}` writes: {error!r}. "
            f"Run `ragfuse bench {command} --json FILE` first, and give it here as --data FILE."
        ) from error


@dataclass(frozen=True)
class Figure:
    """One figure: its title, what the paper says, how it is measured and drawn.

    given: what it was measured with, in words. absent: what of the paper's own is not at hand. is_simulated: no model
    of the settings runs. shows: the benchmark whose result it can be drawn from, "" for none. known_by: what such a
    result holds and no data set does, "" where no file but a result may be named.
    """

    title: str
    paper: str
    measure: Callable[[Wanted], Rows]
    columns: tuple[str, ...]
    draw: Callable[[Any, Sequence[Mapping[str, Any]]], None]
    given: Callable[[Wanted], str] = by_questions
    absent: Callable[[Wanted], list[str]] = lambda wanted: []
    is_simulated: bool = False
    shows: str = ""
    known_by: str = ""

    def source(self, wanted: Wanted) -> Path | None:
        """The result that it is drawn from, if one was named."""
        path = wanted.result if self.shows else None
        return path if path is not None and (not self.known_by or _holds(path, self.known_by)) else None


def _holds(path: Path, key: str) -> bool:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and key in found


def run_figure(name: str, figure: Figure, wanted: Wanted, picture: Path | None) -> dict[str, Any]:
    """Measure a figure, print it beside the paper's, draw it; the result as plain JSON types."""
    rows, console, settings = figure.measure(wanted), wanted.console, wanted.settings
    console.print(f"[bold]{name}: {figure.title}[/]", highlight=False, soft_wrap=True)
    print_rows(figure.columns, rows, console)
    console.print(f"The paper: {figure.paper}", highlight=False)
    source = figure.source(wanted)
    on = "simulated" if figure.is_simulated else f"{settings.model} in {settings.dtype} on {settings.device}"
    differs = f"Here: {on}, {figure.given(wanted)}." if source is None else f"Here: as {source.name} says."
    console.print(differs, highlight=False)
    told = json.loads(source.read_text("utf-8")) if source is not None else {}
    absent = figure.absent(wanted) if source is None else told.get("absent", [])
    for sentence in absent:
        console.print(sentence, highlight=False)
    if picture is not None:
        with saved(picture, (7, 4.5)) as drawing:
            axes = drawing.add_subplot()
            figure.draw(axes, rows)
            drawing.suptitle(fill(figure.title, LINE) + "\n" + fill(differs, LINE), fontsize=9)
            axes.grid(True, alpha=0.3)
        console.print(f"Picture: {picture}", highlight=False)
    return {
        "figure": name,
        "title": figure.title,
        "paper": figure.paper,
        "columns": list(figure.columns),
        "rows": rows,
        **({"absent": absent} if absent else {}),
        **(_measured(figure, wanted, differs) if source is None else {"note": f"drawn from {source.name}"}),
        **{name: told[name] for name in CARRIED if name in told},
    }


def _measured(figure: Figure, wanted: Wanted, differs: str) -> dict[str, Any]:
    """Where and with what a figure was measured here."""
    where = circumstances(torch.device(wanted.settings.device), torch.get_num_threads())
    return {**({"note": differs} if figure.is_simulated else _measured_with(wanted)), **where}


def _measured_with(wanted: Wanted) -> dict[str, Any]:
    return {
        "model": wanted.settings.model,
        "dtype": wanted.settings.dtype,
        "sets": [set_name(name) for name in wanted.sets],
        "limit": wanted.limit,
        "chunk_tokens": wanted.chunk_tokens,
    }


def print_rows(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table of some columns; where it is wider than the terminal, its lines run on, and nothing of them is lost."""
    table = Table(box=None)
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    table.width = console.measure(table, options=console.options.update(width=WIDE)).maximum
    console.print(table, soft_wrap=True)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
