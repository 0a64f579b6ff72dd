"""Entries of a store for people and for machines: a table, sums, what was done with many. How they come about is
`cli/store.py`'s."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ragfuse.cli.show import short

if TYPE_CHECKING:
    from ragfuse.keeping import Cleared, Line, Outcome, Tenant


def show_lines(console: Console, lines: Sequence[Line]) -> None:
    """A table that fits eighty columns; wider ones have the texts' beginnings too."""
    has_text = console.width >= 100
    table = Table(Column("key", min_width=13, no_wrap=True), box=None, pad_edge=False)
    for heading, width in (
        ("model", 24 if has_text else 9),
        ("tier", 8),
        ("encoded", 7),
        ("source", 22 if has_text else 14),
    ):
        table.add_column(heading, no_wrap=True, max_width=width)
    if has_text:
        table.add_column("text", no_wrap=True, max_width=40)
    for heading in ("tokens", "MB", "hits", "used"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        entry = line.entry
        key = line.short + ("*" if entry.pinned else "")
        place = (Text(plain(line.tenant.name)), entry.tier, entry.key.encoded)
        texts = (Text(short(plain(Path(line.source).name))), Text(plain(line.text)))[: 1 + has_text]
        numbers = (str(entry.n_tokens), f"{entry.nbytes / 1e6:,.1f}", str(entry.hits), _ago(entry.last_used))
        table.add_row(Text(plain(key)), *place, *texts, *numbers)
    console.print(table)
    if any(line.entry.pinned for line in lines):
        console.print("* pinned", highlight=False)


def plain(text: str) -> str:
    """A foreign text in one line, without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


def described(lines: Sequence[Line]) -> str:
    """How many entries, how large, and whose, in a few words."""
    tenants = dict.fromkeys(line.tenant.name for line in lines)
    whose = ", ".join(list(tenants)[:4]) + (", ..." if len(tenants) > 4 else "")
    nbytes = sum(line.entry.nbytes for line in lines)
    entries = "1 entry" if len(lines) == 1 else f"{len(lines):,} entries"
    return f"{entries} ({nbytes / 1e6:,.1f} MB) of {plain(whose)}"


def tell_outcome(console: Console, done: Outcome, where: str) -> None:
    """What was done, and what was left out and why."""
    chunks = "1 entry" if done.chunks == 1 else f"{done.chunks:,} entries"
    texts = f" and {done.texts:,} texts" if done.texts else ""
    said = f"{chunks}{texts} ({done.nbytes / 1e6:,.1f} MB) {where}."
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    for trouble in done.troubles[:5]:
        line = f"left out: {trouble.what}: {trouble.why}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if done.failed > 5:
        console.print(f"left out: {done.failed - 5:,} more", highlight=False)


def tell_cleared(console: Console, done: Cleared) -> None:
    """What is gone, and what stayed and where."""
    texts = f" and {done.texts:,} texts" if done.texts else ""
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
    """The same as plain JSON types."""
    counts = {"dropped": len(done.dropped), "nbytes": sum(line.entry.nbytes for line in done.dropped)}
    return {
        **counts,
        "texts": done.texts,
        "stayed": len(done.stayed),
        "silent": list(done.silent),
        "unknown": list(done.unknown),
    }


def outcome_dict(done: Outcome) -> dict[str, Any]:
    """The same as plain JSON types."""
    troubles = [{"what": trouble.what, "why": trouble.why} for trouble in done.troubles]
    counts = {"entries": done.chunks, "nbytes": done.nbytes, "known": done.known, "texts": done.texts}
    return {**counts, "failed": done.failed, "troubles": troubles}


def tier_row(name: str, capacity: int, lines: Sequence[Line]) -> dict[str, Any]:
    """What a tier holds, as plain JSON types."""
    here = [line.entry for line in lines if line.entry.tier == name]
    sums = {"entries": len(here), "nbytes": sum(entry.nbytes for entry in here), "capacity": capacity}
    return {"tier": name, **sums, "pinned": sum(e.pinned for e in here), "hits": sum(entry.hits for entry in here)}


def by_tenant(lines: Sequence[Line]) -> list[tuple[Tenant, int, int]]:
    """(tenant, entries, bytes) of each, the largest first."""
    found: dict[Tenant, tuple[int, int]] = {}
    for line in lines:
        entries, nbytes = found.get(line.tenant, (0, 0))
        found[line.tenant] = (entries + 1, nbytes + line.entry.nbytes)
    return [(tenant, *sums) for tenant, sums in sorted(found.items(), key=lambda pair: -pair[1][1])]
