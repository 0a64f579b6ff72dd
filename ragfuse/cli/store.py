"""`ragfuse store`: what is kept of which text, and what is done with it. No model is loaded for any of this."""

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
    described,
    outcome_dict,
    plain,
    show_lines,
    tell_cleared,
    tell_outcome,
    tier_row,
    told_use,
)
from ragfuse.cli.opened import bar_for, confirm, lines_of, opened, refuse, wish_of
from ragfuse.cli.options import Json, Store, console_for, write_json
from ragfuse.errors import InputError
from ragfuse.types.levels import LEVEL_NAMES

if TYPE_CHECKING:
    from ragfuse.admin.store_admin import EntryFilter

store = typer.Typer(
    no_args_is_help=True,
    help="Manage the stored KV. Running processes keep what they hold in memory; all other changes apply to every "
    "process at once. If a salt is set (RAGFUSE_SALT), ls, clear, pin, unpin, move and export apply to its tenant "
    "unless --tenant names another; without a salt, to all tenants. stats, gc and import apply to the whole store.",
)

Keys = Annotated[list[str] | None, typer.Argument(help="First characters of keys, as `ragfuse store ls` shows them.")]
Tier = Annotated[str | None, typer.Option("--tier", help="Only entries in this tier.")]
Source = Annotated[str | None, typer.Option("--source", help="Only texts whose source contains this.")]
Model = Annotated[str | None, typer.Option("--model", help="Only entries of this model (name or start of digest).")]
Tenant_ = Annotated[
    str | None, typer.Option("--tenant", help="Only the tenant of this salt ('': no salt). Default: RAGFUSE_SALT.")
]
All = Annotated[bool, typer.Option("--all", help="All entries: of the salt that is set, else of all tenants.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

_MOVED = "Nothing is lost: what was copied stays in both tiers, and the same command goes on from there."
_RECODED = "Every entry is whole, as it was or recoded, and the same command goes on from there."
_EXPORTED = "Nothing was written; a file that was there is as it was."
_IMPORTED = "What was kept so far stays, and the same command goes on from there."


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
    """List entries with their text, tier, size and hits, and the totals of each tenant. --json lists all of them."""
    console = console_for(json)
    with opened(store, console) as keeping:
        wish = keeping.mine(wish_of(keys, tier, source, model, tenant))
        lines = lines_of(keeping, console, wish)
        uses = keeping.uses(lines, wish)
    shown = lines[: limit or None]
    if lines:
        show_lines(console, shown)
    if len(shown) < len(lines):
        console.print(f"{len(lines) - len(shown):,} more: --limit 0 shows all.", highlight=False)
    for who, use in uses:
        console.print(Text(f"{plain(who.name)}: {told_use(use)}"))
    nbytes = sum(line.entry.nbytes for line in lines)
    named = [{"model": who.model, "tenant": who.tenant, "digest": who.digest, **use.as_dict()} for who, use in uses]
    write_json({"entries": [line.as_dict() for line in lines], "nbytes": nbytes, "tenants": named}, json)


@store.command("stats")
def stats(store: Store = None, json: Json = None) -> None:
    """Show entries, bytes and hits of each tier, and the totals of each model."""
    console = console_for(json)
    with opened(store, console) as keeping:
        lines = lines_of(keeping, console, None)
        tiers = [tier_row(tier.name, tier.capacity, lines) for tier in keeping.store.tiers]
    models = by_tenant(lines)
    table = Table("tier", box=None)
    for heading in ("entries", "MB", "of MB", "pinned", "hits"):
        table.add_column(heading, justify="right")
    for row in tiers:
        sizes = (f"{row['nbytes'] / 1e6:,.1f}", f"{row['capacity'] / 1e6:,.0f}")
        table.add_row(row["tier"], f"{row['entries']:,}", *sizes, str(row["pinned"]), f"{row['hits']:,}")
    console.print(table)
    for row in tiers:
        if set(row["levels"]) - {LEVEL_NAMES[0]}:
            each = ", ".join(f"{level} {nbytes / 1e6:,.1f} MB" for level, nbytes in row["levels"].items())
            console.print(Text(f"{row['tier']}: {each}"))
    for who, entries, nbytes in models:
        console.print(Text(f"{plain(who.name)}: {counted(entries, 'entry', 'entries')}, {nbytes / 1e6:,.1f} MB"))
    named = [
        {"model": who.model, "tenant": who.tenant, "digest": who.digest, "entries": entries, "nbytes": nbytes}
        for who, entries, nbytes in models
    ]
    write_json({"tiers": tiers, "models": named}, json)


@store.command("clear")
def clear(
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

    Exit status 1 if a tier could not be cleared: then its entries stay, and so do all texts.
    """
    wish, console = wish_of(keys, tier, source, model, tenant, all_, "clear"), console_for(json)
    with opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = lines_of(keeping, console, wish)
        if lines or keeping.text_models(wish):
            what = described(lines) if lines else "all texts of chunks that are kept nowhere"
            confirm(f"Drop {what}?", yes, "clear")
        done = keeping.clear(lines, wish)
    tell_cleared(console, done)
    write_json(cleared_dict(done), json)
    raise typer.Exit(1 if done.silent else 0)


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

    Exit status 1 if a tier concerned does not answer.
    """
    _pin(True, wish_of(keys, tier, source, model, tenant, all_, "pin"), store, json)


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
    """Unpin chunks, so that they can be evicted again. Exit status 1 if a tier concerned does not answer."""
    _pin(False, wish_of(keys, tier, source, model, tenant, all_, "unpin"), store, json)


@store.command("move")
def move(
    to: Annotated[str, typer.Option("--to", help="The tier to move them to.")],
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

    Exit status 1 if some were not moved, or may be in a tier that does not answer.
    """
    wish, console = wish_of(keys, tier, source, model, tenant, all_, "move"), console_for(json)
    with opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = lines_of(keeping, console, wish, "moved")
        with bar_for(console, "moving", _MOVED) as told:
            done = keeping.move(lines, to, told)
        silent = keeping.silent(wish)
    tell_outcome(console, done, f"in tier {to} now")
    write_json({**outcome_dict(done), "silent": silent}, json)
    raise typer.Exit(1 if done.failed or silent else 0)


@store.command("recode")
def recode(
    to: Annotated[str, typer.Option("--to", help=f"Codec level, or several with commas: {', '.join(LEVEL_NAMES)}.")],
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    all_: All = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Convert chunks to other codec levels, each in its tier. Only raw entries can be converted: others are lossy.

    It can be interrupted at any time: every entry is complete, converted or not. Exit status 1 if some were not
    converted, or may be in a tier that does not answer.
    """
    levels = _levels(to)
    wish, console = wish_of(keys, tier, source, model, tenant, all_, "recode"), console_for(json)
    with opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = lines_of(keeping, console, wish, "recoded")
        with bar_for(console, "recoding", _RECODED) as told:
            done = keeping.recode(lines, levels, told)
        silent = keeping.silent(wish)
    said = f"recoded to {'+'.join(levels)}, {done.fewer_nbytes / 1e6:,.1f} MB fewer; {done.known:,} were so before"
    tell_outcome(console, done, said)
    write_json({**outcome_dict(done), "fewer_nbytes": done.fewer_nbytes, "silent": silent}, json)
    raise typer.Exit(1 if done.failed or silent else 0)


@store.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The archive to write.")],
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    texts: Annotated[bool, typer.Option(help="Include the chunks' texts, so that prompts can match them.")] = True,
    yes: Yes = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Write chunks to an archive: those named, else all (of the salt that is set, if any).

    Anyone who has the file can read the texts in it.

    Exit status 1 if some chunks are, or may be, missing from it; an existing file is then left unchanged.
    """
    wish, console = wish_of(keys, tier, source, model, tenant), console_for(json)
    with opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = lines_of(keeping, console, wish, f"written to '{file}'")
        silent = keeping.silent(wish)
        is_there = file.exists() and not file.is_dir()
        if silent and is_there:
            refuse(silent, f"nothing was written, and '{file}' is as it was")
        if is_there:
            confirm(f"'{file}' is there already. Write another in its place?", yes, "export")
        with bar_for(console, "exporting", _EXPORTED) as told:
            done = keeping.export(lines, file, texts, told)
    tell_outcome(console, done, f"written to {file}")
    for name in silent:
        said = f"Tier {name} does not answer: what it holds is not in {file}. Export again once it answers."
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    write_json({**outcome_dict(done), "file": str(file), "silent": silent}, json)
    raise typer.Exit(1 if done.failed or silent else 0)


@store.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An archive written by `ragfuse store export`.")],
    tier: Annotated[str | None, typer.Option("--tier", help="Target tier; default: the first persistent one.")] = None,
    store: Store = None,
    json: Json = None,
) -> None:
    """Import the chunks of an archive. They are hits only for the same model, dtype and salt.

    The author of an archive controls what the model reads: import only archives from people you trust. Exit status 1
    if some of it could not be imported.
    """
    console = console_for(json)
    with opened(store, console, is_new=True) as keeping:
        before = {line.tenant.digest for line in keeping.lines()}
        with bar_for(console, "importing", _IMPORTED) as told:
            done = keeping.import_(file, tier, told)
        strangers = {line.tenant.digest: line.tenant for line in keeping.lines() if line.tenant.digest not in before}
    tell_outcome(console, done, f"kept, {done.known} were there")
    for who in strangers.values():
        if not who.model:
            console.print(f"New in this store: chunks of a model (or tenant) it has not met, {who.digest[:8]}.")
    write_json(outcome_dict(done), json)
    raise typer.Exit(1 if done.failed else 0)


@store.command("gc")
def gc(store: Store = None, json: Json = None) -> None:
    """Delete what is of no use: leftovers of interrupted writes, rows without files, expired entries (ttl_s).

    Exit status 1 if a tier does not answer.
    """
    console = console_for(json)
    with opened(store, console) as keeping, console.status("looking at every file"):
        freed = keeping.gc()
        silent = [tier.name for tier in keeping.store.tiers if tier.name not in freed]
    for name, what in freed.items():
        said = f"{name}: {what.expired:,} too old, {counted(what.orphans, 'rest')}, {what.nbytes / 1e6:,.1f} MB freed"
        console.print(said, highlight=False)
    rows = {name: {"expired": f.expired, "orphans": f.orphans, "nbytes": f.nbytes} for name, f in freed.items()}
    for name in silent:
        console.print(f"{name}: does not answer, nothing is known of it", highlight=False, markup=False)
    write_json({"tiers": rows, "silent": silent}, json)
    raise typer.Exit(1 if silent else 0)


def _pin(pinned: bool, wish: EntryFilter, store: Path | None, json: Path | None) -> None:
    console, word = console_for(json), "pinned" if pinned else "unpinned"
    with opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = lines_of(keeping, console, wish, word)
        keys = list(dict.fromkeys(line.entry.key for line in lines))
        (keeping.store.pin if pinned else keeping.store.unpin)(*keys)
        silent = keeping.silent(wish)
    if lines:
        console.print(f"{word.capitalize()} {described(lines)}.", highlight=False, markup=False)
    write_json({word: len(keys), "silent": silent}, json)
    raise typer.Exit(1 if silent else 0)


def _levels(to: str) -> list[str]:
    """Return the levels named in a list with commas; raise InputError for an unknown one."""
    named = [level.strip() for level in to.split(",")]
    strange = [level for level in named if level not in LEVEL_NAMES]
    if strange:
        raise InputError(
            f"Wanted levels of {', '.join(LEVEL_NAMES)}, with commas between several; found '{strange[0]}'."
        )
    return [level for level in LEVEL_NAMES if level in named]
