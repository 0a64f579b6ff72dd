"""`ragfuse store`: list, delete, pin, move and archive stored entries, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ragfuse.cli.entries import (
    by_tenant,
    cleared_dict,
    counted,
    describe,
    outcome_dict,
    plain,
    print_cleared,
    print_outcome,
    show_entries,
    tier_row,
    use_in_words,
)
from ragfuse.cli.opened import confirm, entry_filter_of, open_admin, progress_bar, refuse, select_entries
from ragfuse.cli.options import Json, Store, Yes, console_for, option, write_json
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.sizes import capacity_text, size_text

if TYPE_CHECKING:
    from ragfuse.admin.store_admin import EntryFilter

store = typer.Typer(
    no_args_is_help=True,
    help="Look after the stored KV, without loading a model.\n\nChanges apply to all processes at once, except to KV "
    "that they hold in memory. If a salt is set (RAGFUSE_SALT), ls, clear, pin, unpin, move and export apply to its "
    "tenant unless --tenant names another; without a salt, to all tenants. stats, gc and import apply to the "
    "whole store.",
)

Keys = Annotated[
    list[str] | None,
    typer.Argument(help="First characters of keys, as `ragfuse store ls` shows them.", show_default="any key"),
]
Tier = Annotated[str | None, option("--tier", "Only entries in this tier.", "all tiers")]
Source = Annotated[str | None, option("--source", "Only texts whose source contains this.", "any source")]
Model = Annotated[str | None, option("--model", "Only entries of this model (name or start of digest).", "all models")]
Tenant_ = Annotated[
    str | None,
    option(
        "--tenant",
        "Only entries of the tenant with this salt or name ('': no salt).",
        "RAGFUSE_SALT, or all tenants without",
    ),
]
All = Annotated[bool, typer.Option("--all", help="All entries: of one tenant if a salt is set, else of all tenants.")]

_MOVED = "Nothing is lost: what was copied is in both tiers. Run the same command again to continue."
_EXPORTED = "Nothing was written; an existing file is unchanged."
_IMPORTED = "What was imported so far stays. Run the same command again to continue."


@store.command("ls")
def ls(
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    limit: Annotated[int, typer.Option(min=0, help="Entries to show, most recently used first; 0: all.")] = 50,
    store: Store = None,
    json: Json = None,
) -> None:
    """List entries with their text, tier, size and hits, and the totals of each tenant. --json lists all entries."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        entry_filter = admin.within_tenant(entry_filter_of(keys, tier, source, model, tenant))
        rows = select_entries(admin, console, entry_filter)
        uses = admin.uses(rows, entry_filter)
    shown = rows[: limit or None]
    if rows:
        show_entries(console, shown)
    if len(shown) < len(rows):
        console.print(f"{len(rows) - len(shown):,} more: --limit 0 shows all.", highlight=False)
    nbytes, in_all = sum(row.entry.nbytes for row in rows), ""
    if rows and not entry_filter.selects_tenants:
        in_all = " in all"
        console.print(f"Selected: {counted(len(rows), 'entry', 'entries')}, {size_text(nbytes)}.", highlight=False)
    for owner, use in uses:
        console.print(Text(f"{plain(owner.name)}{in_all}: {use_in_words(use)}"))
    tenants = [
        {"model": owner.model, "tenant": owner.tenant, "digest": owner.digest, **use.as_dict()} for owner, use in uses
    ]
    write_json({"entries": [row.as_dict() for row in rows], "nbytes": nbytes, "tenants": tenants}, json)


@store.command("stats")
def stats(store: Store = None, json: Json = None) -> None:
    """Show entries, bytes and hits of each tier, and the totals of each model."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        rows = select_entries(admin, console, None)
        tiers = [tier_row(tier.name, tier.capacity, rows) for tier in admin.store.tiers]
    models = by_tenant(rows)
    table = Table("tier", box=None)
    for heading in ("entries", "size", "of", "pinned", "hits"):
        table.add_column(heading, justify="right")
    for totals in tiers:
        sizes = (size_text(totals["nbytes"]), capacity_text(totals["capacity"]))
        table.add_row(totals["tier"], f"{totals['entries']:,}", *sizes, str(totals["pinned"]), f"{totals['hits']:,}")
    console.print(table)
    for totals in tiers:
        if set(totals["levels"]) - {LEVEL_NAMES[0]}:
            by_level = ", ".join(f"{level} {size_text(nbytes)}" for level, nbytes in totals["levels"].items())
            console.print(Text(f"{totals['tier']}: {by_level}"))
    for owner, entries, nbytes in models:
        console.print(Text(f"{plain(owner.name)}: {counted(entries, 'entry', 'entries')}, {size_text(nbytes)}"))
    models_json = [
        {"model": owner.model, "tenant": owner.tenant, "digest": owner.digest, "entries": entries, "nbytes": nbytes}
        for owner, entries, nbytes in models
    ]
    write_json({"tiers": tiers, "models": models_json}, json)


@store.command("clear")
def clear(
    context: typer.Context,
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    all_: All = False,
    yes: Yes = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Delete entries, and the texts of chunks that have no entry left.

    If a salt is set (RAGFUSE_SALT), entries of other tenants stay unless --tenant names one; without a salt, --all
    deletes those of all tenants.

    Exit status 1 if nothing matches, or if a tier could not be cleared: then its entries stay, and so do all texts.
    """
    entry_filter, console = entry_filter_of(keys, tier, source, model, tenant, all_, "clear"), console_for(json)
    with open_admin(store, console) as admin:
        entry_filter = admin.within_tenant(entry_filter)
        rows = select_entries(admin, console, entry_filter)
        if rows or admin.text_models(entry_filter):
            what = describe(rows) if rows else "all texts of chunks that no tier stores"
            confirm(f"Delete {what}?", yes, context)
        cleared = admin.clear(rows, entry_filter)
    print_cleared(console, cleared)
    write_json(cleared_dict(cleared), json)
    found = rows or cleared.texts or not (keys or source)  # whole tiers and tenants may be empty
    raise typer.Exit(1 if cleared.silent or not found else 0)


@store.command("pin")
def pin(
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    all_: All = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Pin chunks: they are never evicted, and never expire.

    Exit status 1 if nothing matches, or a tier concerned does not answer.
    """
    _pin(True, entry_filter_of(keys, tier, source, model, tenant, all_, "pin"), store, json)


@store.command("unpin")
def unpin(
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    all_: All = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Unpin chunks, so that they can be evicted again. Exit status 1 if nothing matches, or a tier does not answer."""
    _pin(False, entry_filter_of(keys, tier, source, model, tenant, all_, "unpin"), store, json)


@store.command("move")
def move(
    to: Annotated[str, typer.Option("--to", help="The tier to move chunks to.")],
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    all_: All = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Move chunks to one tier and delete them from all others. Chunks that do not fit stay where they are.

    Exit status 1 if nothing matches, or if some were not moved, or may be in a tier that does not answer.
    """
    entry_filter, console = entry_filter_of(keys, tier, source, model, tenant, all_, "move"), console_for(json)
    with open_admin(store, console) as admin:
        rows = select_entries(admin, console, entry_filter, "moved")
        with progress_bar(console, "moving", _MOVED) as report:
            outcome = admin.move(rows, to, report)
        silent = admin.silent(entry_filter)
    print_outcome(console, outcome, f"in tier {to} now")
    write_json({**outcome_dict(outcome), "silent": silent}, json)
    raise typer.Exit(1 if outcome.failed or silent or not (rows or entry_filter.selects_all) else 0)


@store.command("export")
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The archive to write.")],
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    texts: Annotated[
        bool,
        typer.Option(
            help="Include the chunks' texts; without them, plain prompts do not match the chunks after the import."
        ),
    ] = True,
    yes: Yes = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Write chunks to an archive: those selected, or all (of the tenant whose salt is set, if any).

    Anyone who has the file can read the texts in it.

    Exit status 1 if some chunks are, or may be, missing from it; an existing file is then left unchanged.
    """
    entry_filter, console = entry_filter_of(keys, tier, source, model, tenant), console_for(json)
    with open_admin(store, console) as admin:
        rows = select_entries(admin, console, entry_filter, f"written to '{file}'")
        silent = admin.silent(entry_filter)
        exists = file.exists() and not file.is_dir()
        if silent and exists:
            refuse(silent, f"nothing was written, and '{file}' is unchanged")
        if exists:
            confirm(f"'{file}' exists already. Overwrite it?", yes, context)
        with progress_bar(console, "exporting", _EXPORTED) as report:
            outcome = admin.export(rows, file, texts, report)
    print_outcome(console, outcome, f"written to {file}")
    for name in silent:
        message = f"Tier {name} does not answer: its entries are not in {file}. Export again once it answers."
        console.print(message, highlight=False, markup=False, soft_wrap=True)
    write_json({**outcome_dict(outcome), "file": str(file), "silent": silent}, json)
    raise typer.Exit(1 if outcome.failed or silent else 0)


@store.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An archive written by `ragfuse store export`.")],
    tier: Annotated[str | None, option("--tier", "Target tier.", "the first that outlives the process")] = None,
    store: Store = None,
    json: Json = None,
) -> None:
    """Import the chunks of an archive. They are hits only for the same model, dtype and salt.

    The author of an archive controls what the model reads: import only archives from people you trust. Exit status 1
    if some of it could not be imported.
    """
    console = console_for(json)
    with open_admin(store, console, may_be_new=True) as admin:
        before = {row.tenant.digest for row in admin.list_entries()}
        with progress_bar(console, "importing", _IMPORTED) as report:
            outcome = admin.import_(file, tier, report)
        new_tenants = {row.tenant.digest: row.tenant for row in admin.list_entries() if row.tenant.digest not in before}
    print_outcome(console, outcome, f"imported, {outcome.known} were there already")
    for owner in new_tenants.values():
        if not owner.model:
            console.print(f"New in this store: chunks of a model (or tenant) that it did not have, {owner.digest[:8]}.")
    write_json(outcome_dict(outcome), json)
    raise typer.Exit(1 if outcome.failed else 0)


@store.command("gc")
def gc(store: Store = None, json: Json = None) -> None:
    """Delete useless data: leftovers of interrupted writes, damaged files, rows without files, expired entries (ttl_s).

    Exit status 1 if a tier does not answer.
    """
    console = console_for(json)
    with open_admin(store, console) as admin, console.status("looking at every file"):
        freed = admin.gc()
        silent = [tier.name for tier in admin.store.tiers if tier.name not in freed]
    for name, removed in freed.items():
        rests = counted(removed.orphans, "leftover")
        console.print(
            f"{name}: {removed.expired:,} expired, {rests}, {size_text(removed.nbytes)} freed", highlight=False
        )
    tiers = {name: {"expired": f.expired, "orphans": f.orphans, "nbytes": f.nbytes} for name, f in freed.items()}
    for name in silent:
        console.print(f"{name}: does not answer, nothing is known of it", highlight=False, markup=False)
    write_json({"tiers": tiers, "silent": silent}, json)
    raise typer.Exit(1 if silent else 0)


def _pin(pinned: bool, entry_filter: EntryFilter, store: Path | None, json: Path | None) -> None:
    console, word = console_for(json), "pinned" if pinned else "unpinned"
    with open_admin(store, console) as admin:
        rows = select_entries(admin, console, entry_filter, word)
        pinning = {tier.name for tier in admin.store.tiers if tier.pins}
        rows = [row for row in rows if row.entry.tier in pinning]  # other media decide what they keep
        changing = [row for row in rows if row.entry.pinned is not pinned]
        keys = list(dict.fromkeys(row.entry.key for row in changing))
        (admin.store.pin if pinned else admin.store.unpin)(*keys)
        silent = admin.silent(entry_filter)
    n_same = len(rows) - len(changing)
    same = f"{counted(n_same, 'entry was', 'entries were')} {word} already." if n_same else ""
    if changing:
        same = f"{word.capitalize()} {describe(changing)}. {same}".rstrip()
    if rows:
        console.print(same, highlight=False, markup=False)
    write_json({word: len(keys), "already": n_same, "silent": silent}, json)
    raise typer.Exit(1 if silent or not (rows or entry_filter.selects_all) else 0)
