"""Output of `ragfuse store`: tables and sums of entries, and results of bulk operations, for people and as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from ragfuse.cli.show import short
from ragfuse.types.levels import LEVEL_NAMES

if TYPE_CHECKING:
    from ragfuse.admin.quotas import TenantUse
    from ragfuse.admin.store_admin import Cleared, EntryRow, Outcome
    from ragfuse.store.tenants import Tenant
    from ragfuse.types.kv import Entry


def show_lines(console: Console, lines: Sequence[EntryRow]) -> None:
    """Print entries as a table. Texts are shortened to fit the console; chunks' texts are shown on wide ones only."""
    has_text, has_levels = console.width >= 100, any(list(line.entry.sizes) != [LEVEL_NAMES[0]] for line in lines)
    rows = [_row(line, has_text, has_levels) for line in lines]
    texts = {"model": 24, "source": 22, "text": 40}
    headings = [
        "key",
        "model",
        "tier",
        *(["level"] if has_levels else ()),
        "encoded",
        "source",
        *(["text"] if has_text else ()),
    ]
    numbers = ["tokens", "MB", "hits", "used"]
    wanted = [
        min(texts.get(name, _WHOLE), max(map(cell_len, (name, *column))))
        for name, *column in zip([*headings, *numbers], *rows, strict=True)
    ]
    shrinking = [i for i, name in enumerate(headings) if name in texts]
    rest = console.width - (len(wanted) - 1) - sum(width for i, width in enumerate(wanted) if i not in shrinking)
    for i, width in zip(shrinking, _shares(rest, [wanted[i] for i in shrinking]), strict=True):
        wanted[i] = width
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in zip([*headings, *numbers], wanted, strict=True):
        table.add_column(
            name, width=width, no_wrap=True, overflow="ellipsis", justify="right" if name in numbers else "left"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    as_wide = console.options.update(width=max(console.width, sum(wanted) + len(wanted) - 1))
    console.print(Segments(console.render(table, as_wide)), end="", crop=False)
    if any(line.entry.pinned for line in lines):
        console.print("* pinned", highlight=False)


_WHOLE = 1 << 20
_LEAST = 6


def _row(line: EntryRow, has_text: bool, has_levels: bool) -> tuple[str, ...]:
    entry = line.entry
    whose = line.short + ("*" if entry.pinned else ""), plain(line.tenant.name)
    place = *whose, entry.tier, *(("+".join(entry.sizes),) if has_levels else ()), entry.key.encoded
    texts = (short(plain(Path(line.source).name)), plain(line.text))[: 1 + has_text]
    return (
        *(*map(plain, place), *texts),
        *(f"{entry.n_tokens:,}", f"{entry.nbytes / 1e6:,.1f}", f"{entry.hits:,}", _ago(entry.last_used)),
    )


def _shares(rest: int, wanted: Sequence[int]) -> list[int]:
    """Divide `rest` characters among columns of the wanted widths, narrow ones first; each gets at least `_LEAST`."""
    shares = [min(width, _LEAST) for width in wanted]
    for _ in range(rest - sum(shares)):
        growing = [i for i, width in enumerate(wanted) if shares[i] < width]
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


def described(lines: Sequence[EntryRow]) -> str:
    """Return a short description of entries: how many, their size, and their tenants."""
    tenants = dict.fromkeys(line.tenant.name for line in lines)
    whose = ", ".join(list(tenants)[:4]) + (", ..." if len(tenants) > 4 else "")
    nbytes = sum(line.entry.nbytes for line in lines)
    return f"{counted(len(lines), 'entry', 'entries')} ({nbytes / 1e6:,.1f} MB) of {plain(whose)}"


def tell_outcome(console: Console, done: Outcome, where: str) -> None:
    """Print the result of a bulk operation: what was done, and what was left out and why."""
    chunks = counted(done.chunks, "entry", "entries")
    texts = f" and {counted(done.texts, 'text')}" if done.texts else ""
    said = f"{chunks}{texts} ({done.nbytes / 1e6:,.1f} MB) {where}."
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    for trouble in done.troubles[:5]:
        line = f"left out: {trouble.what}: {trouble.why}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if done.failed > 5:
        console.print(f"left out: {done.failed - 5:,} more", highlight=False)


def tell_cleared(console: Console, done: Cleared) -> None:
    """Print the result of `ragfuse store clear`: what was deleted, and what stayed in which tier."""
    texts = f" and {counted(done.texts, 'text')}" if done.texts else ""
    if done.dropped or done.texts:
        said = described(done.dropped) if done.dropped else "0 entries"
        console.print(f"Dropped {said}{texts}.", highlight=False, markup=False)
    for name in done.silent:
        n = sum(line.entry.tier == name for line in done.stayed)
        here = f"{n:,} of these entries and whatever else" if n else "what"
        said = f"Tier {name} could not be cleared: {here} it holds stays, and so do all texts."
        console.print(f"{said} Clear again once it answers.", highlight=False, markup=False, soft_wrap=True)
    for name in done.unknown:
        said = f"Tier {name} does not answer: what it holds is not known, so all texts stay."
        console.print(said, highlight=False, markup=False, soft_wrap=True)


def cleared_dict(done: Cleared) -> dict[str, Any]:
    """Return the result of `ragfuse store clear` in plain JSON types."""
    counts = {"dropped": len(done.dropped), "nbytes": sum(line.entry.nbytes for line in done.dropped)}
    return {
        **counts,
        "texts": done.texts,
        "stayed": len(done.stayed),
        "silent": list(done.silent),
        "unknown": list(done.unknown),
    }


def outcome_dict(done: Outcome) -> dict[str, Any]:
    """Return the result of a bulk operation in plain JSON types."""
    troubles = [{"what": trouble.what, "why": trouble.why} for trouble in done.troubles]
    counts = {"entries": done.chunks, "nbytes": done.nbytes, "known": done.known, "texts": done.texts}
    return {**counts, "failed": done.failed, "troubles": troubles}


def tier_row(name: str, capacity: int, lines: Sequence[EntryRow]) -> dict[str, Any]:
    """Return the totals of a tier's entries in plain JSON types."""
    here = [line.entry for line in lines if line.entry.tier == name]
    sums: dict[str, Any] = {"entries": len(here), "nbytes": sum(entry.nbytes for entry in here), "capacity": capacity}
    levels = {level: sum(each.sizes.get(level, 0) for each in here) for level in levels_of(here)}
    sums |= {"levels": levels}
    return {"tier": name, **sums, "pinned": sum(e.pinned for e in here), "hits": sum(entry.hits for entry in here)}


def levels_of(entries: Sequence[Entry]) -> list[str]:
    """Return the codec levels of these entries, the least lossy first."""
    there = dict.fromkeys(level for entry in entries for level in entry.sizes)
    return sorted(there, key=lambda level: LEVEL_NAMES.index(level) if level in LEVEL_NAMES else len(LEVEL_NAMES))


def told_use(use: TenantUse) -> str:
    """Return what a tenant keeps, in words."""
    sizes = " and ".join(f"{nbytes / 1e6:,.1f} MB in {tier}" for tier, nbytes in use.nbytes.items()) or "0.0 MB"
    return f"{sizes}, {counted(use.texts, 'text', 'texts')}, {counted(use.sessions, 'session', 'sessions')}"


def by_tenant(lines: Sequence[EntryRow]) -> list[tuple[Tenant, int, int]]:
    """Return (tenant, entries, bytes) of each tenant, largest first."""
    found: dict[Tenant, tuple[int, int]] = {}
    for line in lines:
        entries, nbytes = found.get(line.tenant, (0, 0))
        found[line.tenant] = (entries + 1, nbytes + line.entry.nbytes)
    return [(tenant, *sums) for tenant, sums in sorted(found.items(), key=lambda pair: -pair[1][1])]
