"""Terminal output: tables, progress, streamed text, and the trace of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ragfuse.telemetry.progress import progress
from ragfuse.types.sizes import capacity_text, size_text

if TYPE_CHECKING:
    from ragfuse.types.answer import Trace

KIND_WORDS = MappingProxyType({"prefix": "prefix", "history": "earlier turns", "chunk": "a chunk"})
"""Names of segments without a source, by kind of segment."""
REUSED = "\u2588", "blue"
RECOMPUTED = "\u2592", "dark_orange"
FRESH = "\u2591", "grey50"
NAMED = 5
"""Maximum number of names in a list of files. Further files are only counted."""


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line without markup. Long lines are wrapped by the terminal."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def show_table(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table with right-aligned numbers. The column `nbytes` is shown as sizes."""
    table = Table(box=None, pad_edge=False)
    for name, value in next(iter(rows), {}).items():
        heading = "size" if name == "nbytes" else name
        table.add_column(
            heading, justify="right" if isinstance(value, int | float) else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    console.print(table)


def _cell(name: str, value: Any) -> Text:
    if isinstance(value, Text):
        return value
    if name == "nbytes":
        return Text(size_text(value))
    if name == "capacity":
        return Text(capacity_text(value))
    if isinstance(value, int | float):
        return Text(f"{value:,}" if isinstance(value, int) else f"{value:,.3g}")
    return Text(plain(value))


@contextmanager
def progress_bar(console: Console, label: str, stopped: str = "") -> Iterator[Callable[..., None]]:
    """Yield a function (done, total, what) that updates a bar. `stopped` is printed on Ctrl-C."""
    with progress(console) as bar:
        task = bar.add_task(label, total=None)

        def update(done: float, total: float | None, what: str = label) -> None:
            bar.update(task, completed=done, total=total, description=escape(what))

        try:
            yield update
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(*stop.args or (stopped,)) from stop


def show_trace(console: Console, trace: Trace) -> None:
    """Print a trace: for each segment the tier it was read from, or why it was not reused."""
    rows = []
    for segment in trace.segments:
        level = "" if segment.level in ("", "raw") else f" as {segment.level}"
        size = f", {size_text(segment.nbytes)}" if segment.nbytes else ""  # 0 for a kept state
        named = Path(segment.source).name or KIND_WORDS.get(segment.kind, segment.kind)
        recomputed = "none: exact" if segment.exact else str(segment.recomputed)
        rows.append(
            {
                "part of the prompt": short(named),
                "tokens": segment.n_tokens,
                "from": f"{segment.tier}{level}{size}" if segment.hit else "not stored",
                "recomputed": recomputed if segment.hit or segment.exact else "all",
                "why": segment.why,
            }
        )
    if rows:
        show_table(console, rows)
    if trace.stream is not None:
        pieces = [vars(piece) for piece in trace.stream.pieces]
        columns = "level", "tokens", "nbytes", "began_s", "seconds", "why"
        show_table(console, [{name: piece[name] for name in columns} for piece in pieces])
    console.print(strip(trace, min(console.width, 100)))
    parts = {"reused from the store  ": REUSED, "recomputed  ": RECOMPUTED, "computed": FRESH}
    console.print(
        Text.assemble(*(piece for word, sign in parts.items() for piece in (sign, f" {word}")))
    )
    console.print(Text(trace.summary))


def strip(trace: Trace, width: int) -> Text:
    """Return a prompt as a strip of `width` characters: reused, recomputed and computed parts."""
    recomputed = set(trace.recomputed_rows)
    cached = [s for s in trace.segments if s.hit]
    text = Text()
    for column in range(width):
        lo = column * trace.tokens // width
        rows = range(lo, max((column + 1) * trace.tokens // width, lo + 1))
        sign = FRESH
        if any(s.start <= lo < s.start + s.n_tokens for s in cached):
            sign = RECOMPUTED if sum(row in recomputed for row in rows) * 4 >= len(rows) else REUSED
        text.append(*sign)
    return text


def short(name: str) -> str:
    """Shorten a file name to at most 22 characters by omitting its middle."""
    return name if len(name) <= 22 else f"{name[:9]}...{name[-10:]}"


def plain(text: str) -> str:
    """Return a text on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def counted(n: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, such as "1 text" or "2 texts"."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def when(seconds: float) -> str:
    """Return a Unix time as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def listed(sources: Iterable[str]) -> str:
    """Return at most `NAMED` document names, such as "a.txt, b.txt and 7 more"."""
    names = list(dict.fromkeys(plain(Path(source).name) for source in sources if Path(source).name))
    return ", ".join(names[:NAMED]) + (
        f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    )


def write(console: Console, text: str) -> None:
    """Print a piece of streamed text unchanged."""
    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def tell_sources(sources: Iterable[str]) -> None:
    """Print the sources of a prompt's passages on standard error."""
    names = listed(sources)
    if names:
        say(Console(stderr=True), f"From {names}.", "dim")
