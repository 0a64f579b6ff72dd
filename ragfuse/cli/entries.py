"""Output of `ragfuse store`: tables and sums of entries, and results of bulk operations, for people and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from ragfuse.cli.show import short
from ragfuse.types.keys import Encoded
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.admin.quotas import TenantUse
    from ragfuse.admin.store_admin import Cleared, EntryRow, Outcome
    from ragfuse.store.tenants import Tenant
    from ragfuse.types.kv import Entry


def show_entries(console: Console, rows: Sequence[EntryRow]) -> None:
    """Print entries as a table, shortened to fit the console.

    Chunks' texts are shown on wide consoles only, names of models where there are several.
    """
    has_models = len({row.tenant.name for row in rows}) > 1
    has_text = console.width >= 100
    has_levels = any(list(row.entry.sizes) != [LEVEL_NAMES[0]] for row in rows)
    table_rows = [_cells(row, has_models, has_text, has_levels) for row in rows]
    max_widths = {"model": 24, "source": 22, "text": 40}
    headings = [
        "key",
        *(["model"] if has_models else ()),
        "tier",
        *(["level"] if has_levels else ()),
        "encoded",
        "source",
        *(["text"] if has_text else ()),
    ]
    numbers = ["tokens", "size", "hits", "used"]
    widths = [
        min(max_widths.get(name, _NO_LIMIT), max(map(cell_len, (name, *column))))
        for name, *column in zip([*headings, *numbers], *table_rows, strict=True)
    ]
    shrinking = [i for i, name in enumerate(headings) if name in max_widths]
    free_width = console.width - (len(widths) - 1) - sum(width for i, width in enumerate(widths) if i not in shrinking)
    for i, width in zip(shrinking, _divide_width(free_width, [widths[i] for i in shrinking]), strict=True):
        widths[i] = width
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in zip([*headings, *numbers], widths, strict=True):
        table.add_column(
            name, width=width, no_wrap=True, overflow="ellipsis", justify="right" if name in numbers else "left"
        )
    for cells in table_rows:
        table.add_row(*map(Text, cells))
    as_wide = console.options.update(width=max(console.width, sum(widths) + len(widths) - 1))
    console.print(Segments(console.render(table, as_wide)), end="", crop=False)
    for line in _legend(rows, has_levels):
        console.print(line, highlight=False, markup=False)


ENCODED_WORDS: Mapping[Encoded, str] = MappingProxyType(
    {
        "filler": "encoded behind filler text or blended chunks; close, not exact",
        "alone": "encoded with nothing before it; exact where a prompt begins with it",
        "prefix": "encoded behind the tokens before it; exact behind the same ones",
    }
)
"""What an entry was encoded behind, and where it is exact, in words."""


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


_NO_LIMIT = 1 << 20
"""Width, in characters, of a column that is never shortened."""
_MIN_WIDTH = 6
"""Least width, in characters, of a shortened column."""


def _cells(row: EntryRow, has_models: bool, has_text: bool, has_levels: bool) -> tuple[str, ...]:
    entry = row.entry
    key, levels = row.short + ("*" if entry.pinned else ""), ("+".join(entry.sizes),) if has_levels else ()
    models = (row.tenant.name,) if has_models else ()
    names = map(plain, (key, *models, entry.tier, *levels, entry.key.encoded))
    more = f" +{len(row.sources) - 1}" if len(row.sources) > 1 else ""
    texts = (f"{short(plain(Path(row.source).name))}{more}", plain(row.text))[: 1 + has_text]
    numbers = (f"{entry.n_tokens:,}", size_text(entry.nbytes), f"{entry.hits:,}", _ago(entry.last_used))
    return (*names, *texts, *numbers)


def _divide_width(free_width: int, widths: Sequence[int]) -> list[int]:
    """Divide `free_width` characters among columns that want `widths`, narrow ones first; `_MIN_WIDTH` is the least."""
    shares = [min(width, _MIN_WIDTH) for width in widths]
    for _ in range(free_width - sum(shares)):
        growing = [i for i, width in enumerate(widths) if shares[i] < width]
        if growing:
            shares[min(growing, key=lambda i: shares[i])] += 1
    return shares


def counted(n: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, such as "1 text" or "2 texts"."""
    return f"{n:,} {noun if n == 1 else nouns or noun + 's'}"


def plain(text: str) -> str:
    """Return a text on one line, without control characters that a terminal would interpret."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def describe(rows: Sequence[EntryRow]) -> str:
    """Return a short description of entries: how many, their size, and their tenants."""
    tenants = dict.fromkeys(row.tenant.name for row in rows)
    names = ", ".join(list(tenants)[:4]) + (", ..." if len(tenants) > 4 else "")
    nbytes = sum(row.entry.nbytes for row in rows)
    return f"{counted(len(rows), 'entry', 'entries')} ({size_text(nbytes)}) of {plain(names)}"


def print_outcome(console: Console, outcome: Outcome, where: str) -> None:
    """Print the result of a bulk operation: what was done, and what was left out and why."""
    chunks = counted(outcome.chunks, "entry", "entries")
    texts = f" and {counted(outcome.texts, 'text')}" if outcome.texts else ""
    summary = f"{chunks}{texts} ({size_text(outcome.nbytes)}) {where}."
    console.print(summary, highlight=False, markup=False, soft_wrap=True)
    for skipped in outcome.troubles[:5]:
        line = f"left out: {skipped.what}: {skipped.why}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if outcome.failed > 5:
        console.print(f"left out: {outcome.failed - 5:,} more", highlight=False)


def print_cleared(console: Console, cleared: Cleared) -> None:
    """Print the result of `ragfuse store clear`: what was deleted, and what stayed in which tier."""
    texts = f" and {counted(cleared.texts, 'text')}" if cleared.texts else ""
    if cleared.dropped or cleared.texts:
        message = describe(cleared.dropped) if cleared.dropped else "0 entries"
        console.print(f"Deleted {message}{texts}.", highlight=False, markup=False)
    for name in cleared.silent:
        n = sum(row.entry.tier == name for row in cleared.stayed)
        here = f"{n:,} of these entries and any others" if n else "its entries"
        message = f"Tier {name} could not be cleared: {here} stay there, and all texts stay, too."
        console.print(f"{message} Clear again once it answers.", highlight=False, markup=False, soft_wrap=True)
    for name in cleared.unknown:
        message = f"Tier {name} does not answer: its entries are not known, so all texts stay."
        console.print(message, highlight=False, markup=False, soft_wrap=True)


def cleared_dict(cleared: Cleared) -> dict[str, Any]:
    """Return the result of `ragfuse store clear` in plain JSON types."""
    counts = {"dropped": len(cleared.dropped), "nbytes": sum(row.entry.nbytes for row in cleared.dropped)}
    return {
        **counts,
        "texts": cleared.texts,
        "stayed": len(cleared.stayed),
        "silent": list(cleared.silent),
        "unknown": list(cleared.unknown),
    }


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the result of a bulk operation in plain JSON types."""
    troubles = [{"what": trouble.what, "why": trouble.why} for trouble in outcome.troubles]
    counts = {"entries": outcome.chunks, "nbytes": outcome.nbytes, "known": outcome.known, "texts": outcome.texts}
    return {**counts, "failed": outcome.failed, "troubles": troubles}


def tier_row(name: str, capacity: int, rows: Sequence[EntryRow]) -> dict[str, Any]:
    """Return the totals of a tier's entries in plain JSON types."""
    entries = [row.entry for row in rows if row.entry.tier == name]
    sums: dict[str, Any] = {
        "entries": len(entries),
        "nbytes": sum(entry.nbytes for entry in entries),
        "capacity": capacity,
    }
    levels = {level: sum(entry.sizes.get(level, 0) for entry in entries) for level in levels_of(entries)}
    sums |= {"levels": levels}
    return {
        "tier": name,
        **sums,
        "pinned": sum(entry.pinned for entry in entries),
        "hits": sum(entry.hits for entry in entries),
    }


def levels_of(entries: Sequence[Entry]) -> list[str]:
    """Return the codec levels of these entries, the least lossy first."""
    levels = dict.fromkeys(level for entry in entries for level in entry.sizes)
    return sorted(levels, key=lambda level: LEVEL_NAMES.index(level) if level in LEVEL_NAMES else len(LEVEL_NAMES))


def use_in_words(use: TenantUse) -> str:
    """Return what a tenant keeps, in words."""
    sizes = " and ".join(f"{size_text(nbytes)} in {tier}" for tier, nbytes in use.nbytes.items()) or "nothing"
    return f"{sizes}, {counted(use.texts, 'text', 'texts')}, {counted(use.sessions, 'session', 'sessions')}"


def by_tenant(rows: Sequence[EntryRow]) -> list[tuple[Tenant, int, int]]:
    """Return (tenant, entries, bytes) of each tenant, largest first."""
    sums: dict[Tenant, tuple[int, int]] = {}
    for row in rows:
        entries, nbytes = sums.get(row.tenant, (0, 0))
        sums[row.tenant] = (entries + 1, nbytes + row.entry.nbytes)
    return [(tenant, *totals) for tenant, totals in sorted(sums.items(), key=lambda pair: -pair[1][1])]
