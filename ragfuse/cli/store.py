"""`ragfuse store`: what is kept of which text, and what is done with it. No model is loaded for any of this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
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
)
from ragfuse.cli.ingest import progress
from ragfuse.cli.options import Json, Store, console_for, settings_of, write_json
from ragfuse.errors import InputError, StoreError

if TYPE_CHECKING:
    from ragfuse.keeping import Keeping, Line, Wish

store = typer.Typer(
    no_args_is_help=True,
    help="Look after the stored KV. A process that is running keeps what it holds in memory until it ends; all else "
    "is seen by every process at once. While a salt is set (RAGFUSE_SALT), ls, clear, pin, unpin, move and export mean "
    "its tenant alone unless --tenant names another; without one they mean all tenants. stats, gc and import are about "
    "the whole store.",
)

Keys = Annotated[list[str] | None, typer.Argument(help="Beginnings of chunks' keys, as `ragfuse store ls` shows them.")]
Tier = Annotated[str | None, typer.Option("--tier", help="Only what is in this tier.")]
Source = Annotated[str | None, typer.Option("--source", help="Only texts whose source has this in its name.")]
Model = Annotated[str | None, typer.Option("--model", help="Only this model's: its name, or its digest's beginning.")]
Tenant_ = Annotated[
    str | None, typer.Option("--tenant", help="Only the tenant of this salt ('': of none); the salt that is set.")
]
All = Annotated[bool, typer.Option("--all", help="Everything of the salt that is set; without a salt, of all tenants.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_MOVED = "Nothing is lost: what was copied stays in both tiers, and the same command goes on from there."
_EXPORTED = "Nothing was written; a file that was there is as it was."
_IMPORTED = "What was kept so far stays, and the same command goes on from there."


@store.command("ls")
def ls(
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    limit: Annotated[int, typer.Option(min=0, help="Entries that are shown, used last first; 0: all.")] = 50,
    store: Store = None,
    json: Json = None,
) -> None:
    """List entries: of which text, where, how large, how often used. --json has all of them."""
    console = console_for(json)
    with _opened(store, console) as keeping:
        lines = _lines(keeping, console, keeping.mine(_wish(keys, tier, source, model, tenant)))
    shown = lines[: limit or None]
    if lines:
        show_lines(console, shown)
    if len(shown) < len(lines):
        console.print(f"{len(lines) - len(shown):,} more: --limit 0 shows all.", highlight=False)
    nbytes = sum(line.entry.nbytes for line in lines)
    write_json({"entries": [line.as_dict() for line in lines], "nbytes": nbytes}, json)


@store.command("stats")
def stats(store: Store = None, json: Json = None) -> None:
    """What each tier and each model hold, and how often it was used."""
    console = console_for(json)
    with _opened(store, console) as keeping:
        lines = _lines(keeping, console, None)
        tiers = [tier_row(tier.name, tier.capacity, lines) for tier in keeping.store.tiers]
    models = by_tenant(lines)
    table = Table("tier", box=None)
    for heading in ("entries", "MB", "of MB", "pinned", "hits"):
        table.add_column(heading, justify="right")
    for row in tiers:
        sizes = (f"{row['nbytes'] / 1e6:,.1f}", f"{row['capacity'] / 1e6:,.0f}")
        table.add_row(row["tier"], f"{row['entries']:,}", *sizes, str(row["pinned"]), f"{row['hits']:,}")
    console.print(table)
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
    """Drop entries, and the texts of chunks that are kept nowhere afterwards.

    While a salt is set (RAGFUSE_SALT), other tenants' stay unless --tenant names one; without a salt, --all drops what
    all tenants have.

    Exit status 1 if a tier that was meant could not be cleared: then what it holds stays, and all texts.
    """
    wish, console = _wish(keys, tier, source, model, tenant, all_, "clear"), console_for(json)
    with _opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = _lines(keeping, console, wish)
        if lines or keeping.text_models(wish):
            what = described(lines) if lines else "all texts of chunks that are kept nowhere"
            _confirm(f"Drop {what}?", yes, "clear")
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
    """Protect chunks: they are not pushed out by others, and never grow too old.

    Exit status 1 if a tier that was meant does not answer.
    """
    _pin(True, _wish(keys, tier, source, model, tenant, all_, "pin"), store, json)


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
    """Let chunks be pushed out again. Exit status 1 if a tier that was meant does not answer."""
    _pin(False, _wish(keys, tier, source, model, tenant, all_, "unpin"), store, json)


@store.command("move")
def move(
    to: Annotated[str, typer.Option("--to", help="The tier that they go to.")],
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    all_: All = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Keep chunks in one tier and nowhere else. What it has no room for stays where it is.

    Exit status 1 if something that was meant stays, or may do so in a tier that does not answer.
    """
    wish, console = _wish(keys, tier, source, model, tenant, all_, "move"), console_for(json)
    with _opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = _lines(keeping, console, wish, "moved")
        with _bar(console, "moving", _MOVED) as told:
            done = keeping.move(lines, to, told)
        silent = keeping.silent(wish)
    tell_outcome(console, done, f"in tier {to} now")
    write_json({**outcome_dict(done), "silent": silent}, json)
    raise typer.Exit(1 if done.failed or silent else 0)


@store.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The archive to write.")],
    keys: Keys = None,
    tier: Tier = None,
    source: Source = None,
    model: Model = None,
    tenant: Tenant_ = None,
    texts: Annotated[bool, typer.Option(help="With the chunks' own texts, so that they are found in prompts.")] = True,
    yes: Yes = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Write chunks into one file: all (of the salt that is set, if one is) unless some are named.

    Who has the file can read the texts from it.

    Exit status 1 if something that was meant is not in it, or may not be; a file that is there is then kept as it is.
    """
    wish, console = _wish(keys, tier, source, model, tenant), console_for(json)
    with _opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = _lines(keeping, console, wish, f"written to '{file}'")
        silent = keeping.silent(wish)
        is_there = file.exists() and not file.is_dir()
        if silent and is_there:
            _refuse(silent, f"nothing was written, and '{file}' is as it was")
        if is_there:
            _confirm(f"'{file}' is there already. Write another in its place?", yes, "export")
        with _bar(console, "exporting", _EXPORTED) as told:
            done = keeping.export(lines, file, texts, told)
    tell_outcome(console, done, f"written to {file}")
    for name in silent:
        said = f"Tier {name} does not answer: what it holds is not in {file}. Export again once it answers."
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    write_json({**outcome_dict(done), "file": str(file), "silent": silent}, json)
    raise typer.Exit(1 if done.failed or silent else 0)


@store.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An archive that `ragfuse store export` has written.")],
    tier: Annotated[str | None, typer.Option("--tier", help="Where they go; the first that outlives us.")] = None,
    store: Store = None,
    json: Json = None,
) -> None:
    """Keep the chunks of an archive. They are found by the same model, dtype and salt alone.

    Whoever wrote it decides what the model will have read: take archives only from people you trust. Exit status 1 if
    something in it could not be used.
    """
    console = console_for(json)
    with _opened(store, console, is_new=True) as keeping:
        before = {line.tenant.digest for line in keeping.lines()}
        with _bar(console, "importing", _IMPORTED) as told:
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
    """Free what is of no use: rests of writes that were killed, rows without files, entries older than ttl_s.

    Exit status 1 if a tier does not answer.
    """
    console = console_for(json)
    with _opened(store, console) as keeping, console.status("looking at every file"):
        freed = keeping.store.gc()
        silent = [tier.name for tier in keeping.store.tiers if tier.name not in freed]
    for name, what in freed.items():
        said = f"{name}: {what.expired:,} too old, {counted(what.orphans, 'rest')}, {what.nbytes / 1e6:,.1f} MB freed"
        console.print(said, highlight=False)
    rows = {name: {"expired": f.expired, "orphans": f.orphans, "nbytes": f.nbytes} for name, f in freed.items()}
    for name in silent:
        console.print(f"{name}: does not answer, nothing is known of it", highlight=False, markup=False)
    write_json({"tiers": rows, "silent": silent}, json)
    raise typer.Exit(1 if silent else 0)


@contextmanager
def _opened(folder: Path | None, console: Console, is_new: bool = False) -> Iterator[Keeping]:
    """The store of the settings. Unless it may be new, one that is not there is told and not made."""
    settings = settings_of(store=folder)
    if not is_new and not settings.tiers and settings.disk_bytes and not _is_there(settings.store_path.expanduser()):
        raise InputError(
            f"There is no store at '{settings.store_path}' yet. Fill it: ragfuse ingest PATH; or name another: --store."
        )
    with console.status("opening the store"):
        from ragfuse.keeping import Keeping

        keeping = Keeping(settings)
    with keeping:
        yield keeping


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # what is wrong is told when it is opened
        return True


def _wish(
    keys: Sequence[str] | None,
    tier: str | None,
    source: str | None,
    model: str | None,
    tenant: str | None,
    all_: bool = False,
    must: str = "",
) -> Wish:
    from ragfuse.keeping import Wish

    wish = Wish(tuple(keys or ()), tier, model, tenant, source)
    if must and wish.is_anything != all_:
        found = "--all beside others" if all_ else "nothing"
        raise InputError(
            f"Wanted what to {must}, found {found}: the beginnings of keys, --tier, --source, --model, --tenant; or "
            "--all by itself."
        )
    return wish


def _lines(keeping: Keeping, console: Console, wish: Wish | None, done: str = "") -> list[Line]:
    """Those that are meant. Silent tiers are told; they end what is to be `done` where nothing else is found."""
    from ragfuse.keeping import Wish

    with console.status("reading the store"):
        lines = keeping.lines(wish or Wish())
        silent, meant = keeping.silent(), keeping.silent(wish or Wish())
    if done and meant and not lines:
        _refuse(meant, f"what it holds is not known, and nothing was {done}")
    for name in silent:
        console.print(f"Tier {name} does not answer: what it holds is not listed.", highlight=False, markup=False)
    if not lines and wish is not None and not meant:
        none = "Nothing in the store is like that"
        empty = "The store is empty: ragfuse ingest PATH."
        if wish.tenant is not None and wish == keeping.mine(replace(wish, tenant=None)):
            empty = f"{none} and of the salt that is set; --tenant SALT names another tenant, no salt means all."
        elif not wish.is_anything:
            empty = f"{none}; `ragfuse store ls` lists all."
        console.print(empty, highlight=False)
    return lines


def _refuse(silent: Sequence[str], so: str) -> NoReturn:
    from ragfuse.keeping import unanswered

    raise StoreError(unanswered(silent, so))


def _pin(pinned: bool, wish: Wish, store: Path | None, json: Path | None) -> None:
    console, word = console_for(json), "pinned" if pinned else "unpinned"
    with _opened(store, console) as keeping:
        wish = keeping.mine(wish)
        lines = _lines(keeping, console, wish, word)
        keys = list(dict.fromkeys(line.entry.key for line in lines))
        (keeping.store.pin if pinned else keeping.store.unpin)(*keys)
        silent = keeping.silent(wish)
    if lines:
        console.print(f"{word.capitalize()} {described(lines)}.", highlight=False, markup=False)
    write_json({word: len(keys), "silent": silent}, json)
    raise typer.Exit(1 if silent else 0)


def _confirm(question: str, yes: bool, command: str) -> None:
    """Go on if a person says so; InputError where there is none to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question} Nobody is there to ask: say ragfuse store {command} --yes.")
    if not typer.confirm(question, err=True):
        Console(stderr=True).print("Nothing was changed.")
        raise typer.Exit(1)


@contextmanager
def _bar(console: Console, doing: str, stopped: str) -> Iterator[Callable[[int, int], object]]:
    """Takes progress. stopped: what is true where it ends by Ctrl-C."""
    columns = (TextColumn(doing), BarColumn(20), DownloadColumn(), TimeRemainingColumn())
    with progress(console, *columns) as bar:
        task = bar.add_task(doing, total=None)
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(stopped) from stop
