"""`ragfuse store`: list, delete and pin stored entries, without loading a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.open_store import confirm, open_kv
from ragfuse.cli.options import Yes, option, screen
from ragfuse.cli.show import counted, plain, say, short, show_table, when
from ragfuse.errors import InputError
from ragfuse.settings import Settings
from ragfuse.types.sizes import capacity_text, size_text

if TYPE_CHECKING:
    from ragfuse.cli.entries import EntryFilter, EntryRow, OpenStore

store = typer.Typer(
    no_args_is_help=True,
    help=(
        "Look after the stored KV, without loading a model.\n\nChanges take effect at once in all"
        " processes, except for KV that they hold in memory. If a salt is set (RAGFUSE_SALT), ls,"
        " rm and pin apply to its tenant unless --tenant names another; without a salt, to all"
        " tenants. gc applies to the whole store."
    ),
)

FILTER = MappingProxyType(
    {
        "keys": Annotated[
            list[str] | None,
            typer.Argument(
                help="First characters of keys, as `ragfuse store ls` shows them.",
                show_default="any key",
            ),
        ],
        "tier": Annotated[str | None, option("--tier", "Only entries in this tier.", "all tiers")],
        "source": Annotated[
            str | None, option("--source", "Only texts whose source contains this.", "any source")
        ],
        "model": Annotated[
            str | None,
            option(
                "--model", "Only entries of this model (name or start of digest).", "all models"
            ),
        ],
        "tenant": Annotated[
            str | None,
            option(
                "--tenant",
                "Only entries of the tenant with this salt or name ('': no salt).",
                "RAGFUSE_SALT, or all tenants without",
            ),
        ],
    }
)
"""The options that select entries."""
All = Annotated[
    bool,
    typer.Option("--all", help="All entries: of one tenant if a salt is set, else of all tenants."),
]


@store.command("ls")
@screen("store", **FILTER)
def ls(
    console: Console,
    settings: Settings,
    limit: Annotated[
        int, typer.Option(min=0, help="Entries to show, most recently used first; 0: all.")
    ] = 50,
    **conditions: Any,
) -> dict[str, Any]:
    """List entries with tier, size and hits, and totals per tier and tenant. --json lists all,
    with their texts.

    A star marks what is pinned. An entry was encoded "alone" (exact where a prompt begins with it),
    as a "prefix" (exact after the same tokens), or after "filler" text (close, not exact).
    """
    with _selected(settings, console, conditions) as (kept, entry_filter, rows):
        from ragfuse.store.tier import totals

        tiers = totals(kept.store.tiers, [row.entry for row in rows])
        catalog, everything = kept.catalog.strict, kept.store.entries()
        tenants = list[dict[str, Any]]()
        for owner in {row.tenant for row in rows}.union(kept.whole_tenants(entry_filter)):
            nbytes = Counter[str]()
            for entry in everything:
                nbytes[entry.tier] += entry.nbytes if entry.key.model == owner.digest else 0
            tenants.append(
                {
                    **vars(owner),
                    "name": owner.name,
                    "texts": catalog.count_texts(owner.digest),
                    "sessions": catalog.count_sessions(owner.digest),
                    "nbytes": dict(nbytes),
                }
            )
    tenants.sort(key=lambda each: -sum(each["nbytes"].values()))
    shown = [
        {
            "key": row.entry.key.tokens[:12] + "*" * row.entry.pinned,
            "tier": row.entry.tier,
            "encoded": row.entry.key.encoded,
            "source": short(Path(next(iter(row.sources), "")).name),
            "tokens": row.entry.n_tokens,
            "nbytes": row.entry.nbytes,
            "hits": row.entry.hits,
            "used": when(row.entry.last_used),
        }
        for row in rows[: limit or None]
    ]
    show_table(console, shown)
    if len(shown) < len(rows):
        say(console, f"{len(rows) - len(shown):,} more: --limit 0 shows all.")
    show_table(console, [{**each, "capacity": capacity_text(each["capacity"])} for each in tiers])
    names = ("name", "texts", "sessions")
    sizes = [sum(each["nbytes"].values()) for each in tenants]
    show_table(
        console,
        [
            {name: each[name] for name in names} | {"nbytes": size}
            for each, size in zip(tenants, sizes, strict=True)
        ],
    )
    return {
        "entries": [row.as_dict() for row in rows],
        "nbytes": sum(row.entry.nbytes for row in rows),
        "tiers": tiers,
        "tenants": tenants,
    }


@store.command("rm")
@screen("store", **FILTER)
def rm(
    console: Console, settings: Settings, all_: All = False, yes: Yes = False, **conditions: Any
) -> tuple[dict[str, Any], bool]:
    """Delete entries, and the texts of chunks that have no entry left.

    If a salt is set (RAGFUSE_SALT), entries of other tenants stay unless --tenant names one;
    without a salt, --all deletes those of all tenants.

    Exit status 1 if nothing matches, or if a tier does not answer: then its entries and all texts
    are kept.
    """
    _require_choice(conditions, all_, "delete")
    with _selected(settings, console, conditions) as (kept, entry_filter, rows):
        if rows or kept.whole_tenants(entry_filter):
            confirm(
                f"Delete {describe(rows) if rows else 'all texts of chunks that no tier stores'}?",
                yes,
            )
        dropped, n_texts, silent = kept.clear(rows, entry_filter)
    if dropped or n_texts:
        say(console, f"Deleted {describe(dropped)}, {counted(n_texts, 'text')}.")
    for name in silent:
        say(console, f"Tier {name} does not answer: what it holds stays, and so do all texts.")
    result = {
        "dropped": len(dropped),
        "nbytes": sum(row.entry.nbytes for row in dropped),
        "texts": n_texts,
        "stayed": len(rows) - len(dropped),
        "silent": silent,
    }
    # whole tiers may be empty
    found = rows or n_texts or not (entry_filter.keys or entry_filter.source)
    return result, bool(found and not silent)


@store.command("pin")
@screen("store", **FILTER)
def pin(
    console: Console,
    settings: Settings,
    all_: All = False,
    off: Annotated[
        bool, typer.Option("--off", help="Take pins off, so that chunks can be evicted again.")
    ] = False,
    **conditions: Any,
) -> tuple[dict[str, Any], bool]:
    """Pin chunks: they are never evicted, and never expire.

    Exit status 1 if nothing matches, or a tier concerned does not answer.
    """
    _require_choice(conditions, all_, "pin")
    with _selected(settings, console, conditions) as (kept, entry_filter, rows):
        # other media decide what they keep
        rows = [row for row in rows if kept.store.tier(row.entry.tier).pins]
        changing = [row for row in rows if row.entry.pinned is off]
        keys = {row.entry.key for row in changing}
        kept.store.pin(keys, not off)
        silent = kept.silent(entry_filter)
    word = "unpinned" if off else "pinned"
    say(console, f"{describe(changing)} {word}, {len(rows) - len(changing):,} were so before.")
    result = {word: len(keys), "already": len(rows) - len(changing), "silent": silent}
    return result, bool((rows or all_) and not silent)


@store.command("gc")
@screen("store")
def gc(console: Console, settings: Settings) -> tuple[dict[str, Any], bool]:
    """Delete expired entries (ttl_s), and what interrupted writes left behind.

    Exit status 1 if a tier does not answer.
    """
    from ragfuse.store import deletion

    with open_kv(settings, console) as kept, console.status("looking at every file"):
        freed = deletion.gc(kept.store)
        silent = [tier.name for tier in kept.store.tiers if tier.name not in freed]
    for name, (expired, nbytes) in freed.items():
        say(console, f"{name}: {expired:,} expired, {size_text(nbytes)} freed")
    for name in silent:
        say(console, f"{name}: does not answer, nothing is known of it")
    return {
        "tiers": {
            name: {"expired": expired, "nbytes": nbytes}
            for name, (expired, nbytes) in freed.items()
        },
        "silent": silent,
    }, not silent


def _require_choice(conditions: dict[str, Any], all_: bool, verb: str) -> None:
    """Raise InputError unless either conditions are given, or --all."""
    if all_ == any(each is not None and each != [] for each in conditions.values()):
        raise InputError(
            f"Say what to {verb}: first characters of keys, --tier, --source, --model or --tenant;"
            " or --all alone."
        )


@contextmanager
def _selected(
    settings: Settings, console: Console, conditions: dict[str, Any]
) -> Iterator[tuple[OpenStore, EntryFilter, list[EntryRow]]]:
    """Open the store, and select entries by the options: of one tenant if a salt is set and they
    name none. Print which tiers do not answer.
    """
    with open_kv(settings, console) as kept:
        from ragfuse.cli.entries import EntryFilter

        entry_filter = EntryFilter(**{**conditions, "keys": tuple(conditions["keys"] or ())})
        selects_all = entry_filter == EntryFilter()
        if settings.salt and entry_filter.tenant is None:
            entry_filter = replace(entry_filter, tenant=settings.salt)
        with console.status("reading the store"):
            rows = kept.selected(entry_filter)
        for name in kept.store.silent():
            say(console, f"Tier {name} does not answer: its entries are not listed.")
        if not rows and not kept.silent(entry_filter):
            nothing = (
                "Nothing in the store matches; `ragfuse store ls` lists all, of one tenant if a"
                " salt is set."
            )
            empty = "The store is empty: ragfuse ingest PATH."
            say(console, empty if selects_all and not settings.salt else nothing)
        yield kept, entry_filter, rows


def describe(rows: Sequence[EntryRow]) -> str:
    """Return a short description of entries: how many, their size, and their tenants."""
    names = "".join(f" of {plain(name)}" for name in dict.fromkeys(row.tenant.name for row in rows))
    nbytes = sum(row.entry.nbytes for row in rows)
    return f"{counted(len(rows), 'entry', 'entries')} ({size_text(nbytes)}){names}"
