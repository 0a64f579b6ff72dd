"""Output of `ragfuse store`: tables of entries and tiers, and results of exports and imports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragfuse.cli.show import counted, plain, short
from ragfuse.types.keys import Encoded
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.sizes import capacity_text, size_text

if TYPE_CHECKING:
    from ragfuse.admin.store_admin import EntryRow
    from ragfuse.store import Tier
    from ragfuse.store.archive import Outcome

ENCODED_WORDS: Mapping[Encoded, str] = MappingProxyType(
    {
        "filler": "encoded behind filler text or blended chunks; close, not exact",
        "alone": "encoded with nothing before it; exact where a prompt begins with it",
        "prefix": "encoded behind the tokens before it; exact behind the same ones",
    }
)
"""What an entry was encoded behind, and where it is exact, in words."""


def show_entries(console: Console, rows: Sequence[EntryRow]) -> None:
    """Print entries as a table, in which models, sources and texts are shortened to fit the console.

    Texts are shown on wide consoles only, names of models where there are several.
    """
    columns: dict[str, list[str]] = {"key": [row.short + ("*" if row.entry.pinned else "") for row in rows]}
    if len({row.tenant.name for row in rows}) > 1:
        columns["model"] = [row.tenant.name for row in rows]
    columns["tier"] = [row.entry.tier for row in rows]
    has_levels = any(list(row.entry.sizes) != [LEVEL_NAMES[0]] for row in rows)
    if has_levels:
        columns["level"] = ["+".join(row.entry.sizes) for row in rows]
    columns["encoded"] = [row.entry.key.encoded for row in rows]
    columns["source"] = [_source(row) for row in rows]
    if console.width >= 100:
        columns["text"] = [row.text for row in rows]
    columns["tokens"] = [f"{row.entry.n_tokens:,}" for row in rows]
    columns["size"] = [size_text(row.entry.nbytes) for row in rows]
    columns["hits"] = [f"{row.entry.hits:,}" for row in rows]
    columns["used"] = [_ago(row.entry.last_used) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        shrinks = name in ("model", "source", "text")
        justify: Any = "right" if name in ("tokens", "size", "hits", "used") else "left"
        table.add_column(name, no_wrap=not shrinks, min_width=6, max_width=40 if shrinks else None, justify=justify)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*(Text(plain(cell), no_wrap=True, overflow="ellipsis") for cell in cells))
    console.print(table)
    for line in _legend(rows, has_levels):
        console.print(line, highlight=False, markup=False)


def _source(row: EntryRow) -> str:
    more = f" +{len(row.sources) - 1}" if len(row.sources) > 1 else ""
    return f"{short(plain(Path(row.source).name))}{more}"


def _legend(rows: Sequence[EntryRow], has_levels: bool) -> Iterator[str]:
    """Yield what the words of the table mean that are in it."""
    from ragfuse.store.deletion import LEARNT  # loads torch

    if any(row.entry.pinned for row in rows):
        yield "* pinned"
    found = {row.entry.key.encoded for row in rows}
    yield from (f"{name}: {words}" for name, words in ENCODED_WORDS.items() if name in found)
    if any(LEARNT in row.sources for row in rows):
        yield f"{LEARNT}: learnt from prompts that held it"
    if has_levels:
        yield f"{LEVEL_NAMES[0]}: as computed; {LEVEL_NAMES[1]} to {LEVEL_NAMES[-1]}: ever smaller, with ever more loss"


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def describe(rows: Sequence[EntryRow]) -> str:
    """Return a short description of entries: how many, their size, and their tenants."""
    names = ", ".join(dict.fromkeys(row.tenant.name for row in rows))
    nbytes = sum(row.entry.nbytes for row in rows)
    return f"{counted(len(rows), 'entry', 'entries')} ({size_text(nbytes)}) of {plain(names)}"


def print_outcome(console: Console, outcome: Outcome, where: str) -> dict[str, Any]:
    """Print the result of a bulk operation: what was done, and what was left out and why; return it as JSON types."""
    failed, nbytes = len(outcome.troubles), sum(outcome.done.values())
    chunks = counted(len(outcome.done), "entry", "entries")
    texts = f" and {counted(outcome.texts, 'text')}" if outcome.texts else ""
    lines = [f"{chunks}{texts} ({size_text(nbytes)}) {where}."]
    lines += [f"left out: {what}: {why}" for what, why in outcome.troubles[:5]]
    if failed > 5:
        lines.append(f"left out: {failed - 5:,} more")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    troubles = [{"what": what, "why": why} for what, why in outcome.troubles]
    counts = {"entries": len(outcome.done), "nbytes": nbytes, "known": outcome.known, "texts": outcome.texts}
    return {**counts, "failed": failed, "troubles": troubles}


def show_tiers(console: Console, tiers: Sequence[Tier], rows: Sequence[EntryRow]) -> list[dict[str, Any]]:
    """Print the totals of each tier, by codec level where some are not raw; return them in plain JSON types."""
    table = Table("tier", box=None, pad_edge=False)
    for heading in ("entries", "size", "of", "pinned", "hits"):
        table.add_column(heading, justify="right")
    table.add_column("levels")
    found = list[dict[str, Any]]()
    for tier in tiers:
        entries = [row.entry for row in rows if row.entry.tier == tier.name]
        levels = dict[str, int]()
        for name in LEVEL_NAMES:
            nbytes = sum(entry.sizes.get(name, 0) for entry in entries)
            levels |= {name: nbytes} if nbytes else {}
        totals: dict[str, Any] = {
            "tier": tier.name,
            "entries": len(entries),
            "nbytes": sum(entry.nbytes for entry in entries),
            "capacity": tier.capacity,
            "levels": levels,
            "pinned": sum(entry.pinned for entry in entries),
            "hits": sum(entry.hits for entry in entries),
        }
        found.append(totals)
        table.add_row(
            tier.name,
            f"{totals['entries']:,}",
            size_text(totals["nbytes"]),
            capacity_text(tier.capacity),
            f"{totals['pinned']:,}",
            f"{totals['hits']:,}",
            ", ".join(f"{level} {size_text(nbytes)}" for level, nbytes in levels.items()),
        )
    console.print(table)
    return found
