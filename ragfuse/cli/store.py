"""`ragfuse store`: list, delete, pin and archive stored entries, without loading a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ragfuse.cli.entries import describe, print_outcome, show_entries, show_tiers
from ragfuse.cli.open_store import confirm, open_admin
from ragfuse.cli.options import Json, Store, Yes, console_for, option, write_json
from ragfuse.cli.show import counted, plain
from ragfuse.errors import InputError, StoreError
from ragfuse.telemetry.progress import progress
from ragfuse.types.sizes import size_text

if TYPE_CHECKING:
    from ragfuse.admin.store_admin import EntryFilter, EntryRow, StoreAdmin

store = typer.Typer(
    no_args_is_help=True,
    help="Look after the stored KV, without loading a model.\n\nChanges apply to all processes at once, except to KV "
    "that they hold in memory. If a salt is set (RAGFUSE_SALT), ls, rm, pin and export apply to its tenant unless "
    "--tenant names another; without a salt, to all tenants. gc and import apply to the whole store.",
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
    """List entries with their text, tier, size and hits, and the totals of tiers and tenants. --json lists all."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        entry_filter = _entry_filter(keys, tier, source, model, tenant)
        rows = _select(admin, console, entry_filter)
        uses = admin.uses(rows, admin.within_tenant(entry_filter))
        tiers = admin.store.tiers
    shown = rows[: limit or None]
    if rows:
        show_entries(console, shown)
    if len(shown) < len(rows):
        console.print(f"{len(rows) - len(shown):,} more: --limit 0 shows all.", highlight=False)
    totals = show_tiers(console, tiers, rows)
    for owner, use in uses:
        sizes = " and ".join(f"{size_text(nbytes)} in {name}" for name, nbytes in use.nbytes.items()) or "nothing"
        kept = f"{sizes}, {counted(use.texts, 'text')}, {counted(use.sessions, 'session')}"
        console.print(Text(f"{plain(owner.name)} in all: {kept}"))
    tenants = [
        {"model": owner.model, "tenant": owner.tenant, "digest": owner.digest, **use.as_dict()} for owner, use in uses
    ]
    nbytes = sum(row.entry.nbytes for row in rows)
    entries = [row.as_dict() for row in rows]
    write_json({"entries": entries, "nbytes": nbytes, "tiers": totals, "tenants": tenants}, json)


@store.command("rm")
def rm(
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

    Exit status 1 if nothing matches, or if a tier does not answer: then what it holds stays, and so do all texts.
    """
    entry_filter, console = _entry_filter(keys, tier, source, model, tenant, all_, "delete"), console_for(json)
    with open_admin(store, console) as admin:
        entry_filter = admin.within_tenant(entry_filter)
        rows = _select(admin, console, entry_filter)
        if rows or admin.text_models(entry_filter):
            confirm(f"Delete {describe(rows) if rows else 'all texts of chunks that no tier stores'}?", yes)
        cleared = admin.clear(rows, entry_filter)
    dropped = cleared.dropped
    if dropped or cleared.texts:
        what = f"{describe(dropped) if dropped else '0 entries'}, {counted(cleared.texts, 'text')}"
        console.print(f"Deleted {what}.", highlight=False, markup=False)
    for name in cleared.silent:
        message = f"Tier {name} does not answer: what it holds stays there, and all texts stay. Delete again later."
        console.print(message, highlight=False, markup=False, soft_wrap=True)
    result = {
        "dropped": len(dropped),
        "nbytes": sum(row.entry.nbytes for row in dropped),
        "texts": cleared.texts,
        "stayed": len(rows) - len(dropped),
        "silent": list(cleared.silent),
    }
    write_json(result, json)
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
    off: Annotated[bool, typer.Option("--off", help="Take pins off, so that chunks can be evicted again.")] = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Pin chunks: they are never evicted, and never expire.

    Exit status 1 if nothing matches, or a tier concerned does not answer.
    """
    entry_filter, console = _entry_filter(keys, tier, source, model, tenant, all_, "pin"), console_for(json)
    with open_admin(store, console) as admin:
        rows = _select(admin, console, entry_filter, "nothing was changed")
        pinning = {tier.name for tier in admin.store.tiers if tier.pins}  # other media decide what they keep
        rows = [row for row in rows if row.entry.tier in pinning]
        changing = [row for row in rows if row.entry.pinned is off]
        keys_of = list(dict.fromkeys(row.entry.key for row in changing))
        (admin.store.unpin if off else admin.store.pin)(*keys_of)
        silent = admin.silent(entry_filter)
    word = "unpinned" if off else "pinned"
    changed = f"{describe(changing)} {word}" if changing else f"Nothing {word}"
    if rows:
        console.print(f"{changed}, {len(rows) - len(changing):,} were so before.", highlight=False, markup=False)
    write_json({word: len(keys_of), "already": len(rows) - len(changing), "silent": silent}, json)
    raise typer.Exit(1 if silent or not (rows or entry_filter.selects_all) else 0)


@store.command("export")
def export(
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
    entry_filter, console = _entry_filter(keys, tier, source, model, tenant), console_for(json)
    with open_admin(store, console) as admin:
        consequence = f"nothing was written to '{file}'"
        rows = _select(admin, console, entry_filter, consequence)
        silent = admin.silent(entry_filter)
        if file.is_file():
            if silent:
                _refuse(silent, consequence)
            confirm(f"'{file}' exists already. Overwrite it?", yes)
        with _progress_bar(console, "exporting", "Nothing was written; an existing file is unchanged.") as report:
            outcome = admin.export(rows, file, texts, report)
    result = print_outcome(console, outcome, f"written to {file}")
    write_json({**result, "file": str(file), "silent": silent}, json)
    raise typer.Exit(1 if outcome.troubles or silent else 0)


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
    stopped = "What was imported so far stays. Run the same command again to continue."
    with (
        open_admin(store, console, may_be_new=True) as admin,
        _progress_bar(console, "importing", stopped) as report,
    ):
        outcome = admin.import_(file, tier, report)
    write_json(print_outcome(console, outcome, f"imported, {outcome.known} were there already"), json)
    raise typer.Exit(1 if outcome.troubles else 0)


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
        counts = f"{removed.expired:,} expired, {counted(removed.leftovers, 'leftover')}"
        console.print(f"{name}: {counts}, {size_text(removed.nbytes)} freed", highlight=False)
    for name in silent:
        console.print(f"{name}: does not answer, nothing is known of it", highlight=False, markup=False)
    tiers = {name: {"expired": f.expired, "leftovers": f.leftovers, "nbytes": f.nbytes} for name, f in freed.items()}
    write_json({"tiers": tiers, "silent": silent}, json)
    raise typer.Exit(1 if silent else 0)


def _entry_filter(
    keys: Sequence[str] | None,
    tier: str | None,
    source: str | None,
    model: str | None,
    tenant: str | None,
    all_: bool = False,
    verb: str = "",
) -> EntryFilter:
    """Return the filter that the options describe.

    Raises:
        InputError: The command, of which `verb` is the verb, needs either conditions or --all.
    """
    from ragfuse.admin.store_admin import EntryFilter

    entry_filter = EntryFilter(tuple(keys or ()), tier, model, tenant, source)
    if verb and entry_filter.selects_all != all_:
        raise InputError(
            f"Say what to {verb}: first characters of keys, --tier, --source, --model or --tenant; or --all alone."
        )
    return entry_filter


def _select(admin: StoreAdmin, console: Console, entry_filter: EntryFilter, consequence: str = "") -> list[EntryRow]:
    """Return the selected entries, of one tenant if a salt is set; print which tiers do not answer.

    Raises:
        StoreError: Nothing was found, a selected tier does not answer, and that has a `consequence`.
    """
    entry_filter = admin.within_tenant(entry_filter)
    with console.status("reading the store"):
        rows = admin.list_entries(entry_filter)
        silent = admin.silent(entry_filter)
    if consequence and silent and not rows:
        _refuse(silent, consequence)
    for name in admin.silent():
        console.print(f"Tier {name} does not answer: its entries are not listed.", highlight=False, markup=False)
    if not rows and not silent:
        nothing = "Nothing in the store matches; `ragfuse store ls` lists all, of one tenant if a salt is set."
        empty = "The store is empty: ragfuse ingest PATH."
        console.print(empty if entry_filter.selects_all else nothing, highlight=False)
    return rows


def _refuse(silent: Sequence[str], consequence: str) -> NoReturn:
    from ragfuse.store.deletion import unanswered

    raise StoreError(unanswered(silent, consequence))


@contextmanager
def _progress_bar(console: Console, label: str, stopped: str) -> Iterator[Callable[[int, int], object]]:
    """Yield a function (done, total) that updates a progress bar; `stopped` is the message after Ctrl-C."""
    columns = (TextColumn(label), BarColumn(20), DownloadColumn(), TimeRemainingColumn())
    with progress(console, *columns) as bar:
        task = bar.add_task(label, total=None)
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(stopped) from stop
