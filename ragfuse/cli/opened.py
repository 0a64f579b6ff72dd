"""Helpers of the `ragfuse store` commands: open the store, select entries, ask for confirmation, show progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from ragfuse.cli.ingest import progress
from ragfuse.cli.options import settings_of
from ragfuse.errors import InputError, StoreError

if TYPE_CHECKING:
    from ragfuse.admin.store_admin import EntryFilter, EntryRow, StoreAdmin


@contextmanager
def opened(folder: Path | None, console: Console, is_new: bool = False) -> Iterator[StoreAdmin]:
    """Open the store of the settings; unless `is_new`, raise InputError for a store that does not exist yet."""
    settings = settings_of(store=folder)
    if not is_new and not settings.tiers and settings.disk_bytes and not _is_there(settings.store_path):
        raise InputError(
            f"There is no store at '{settings.store_path}' yet. Fill it: ragfuse ingest PATH; or name another: --store."
        )
    with console.status("opening the store"):
        from ragfuse.admin.store_admin import StoreAdmin

        keeping = StoreAdmin(settings)
    with keeping:
        yield keeping


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # what is wrong is told when it is opened
        return True


def wish_of(
    keys: Sequence[str] | None,
    tier: str | None,
    source: str | None,
    model: str | None,
    tenant: str | None,
    all_: bool = False,
    must: str = "",
) -> EntryFilter:
    """Return the filter that the options describe.

    Args:
        keys: Beginnings of chunk keys.
        tier: Name of a tier.
        source: Part of the source.
        model: A model's name, or the beginning of a digest.
        tenant: A salt.
        all_: Whether --all was given.
        must: The command's verb, where it needs either conditions or --all; "": it does not.

    Raises:
        InputError: `must` is given, and there are neither conditions nor --all, or both.
    """
    from ragfuse.admin.store_admin import EntryFilter

    wish = EntryFilter(tuple(keys or ()), tier, model, tenant, source)
    if must and wish.is_anything != all_:
        found = "--all beside others" if all_ else "nothing"
        raise InputError(
            f"Wanted what to {must}, found {found}: the beginnings of keys, --tier, --source, --model, --tenant; or "
            "--all by itself."
        )
    return wish


def lines_of(keeping: StoreAdmin, console: Console, wish: EntryFilter | None, done: str = "") -> list[EntryRow]:
    """Return the selected entries, and print which tiers do not answer.

    With `done` (what the command does, as a participle), raise StoreError where nothing was found and a selected tier
    does not answer.
    """
    from ragfuse.admin.store_admin import EntryFilter

    with console.status("reading the store"):
        lines = keeping.lines(wish or EntryFilter())
        silent, meant = keeping.silent(), keeping.silent(wish or EntryFilter())
    if done and meant and not lines:
        refuse(meant, f"what it holds is not known, and nothing was {done}")
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


def refuse(silent: Sequence[str], so: str) -> NoReturn:
    """Raise StoreError: these tiers do not answer, with the consequence `so`."""
    from ragfuse.admin.store_admin import unanswered

    raise StoreError(unanswered(silent, so))


def confirm(question: str, yes: bool, command: str) -> None:
    """Ask for confirmation, unless `yes`; InputError without a terminal to ask at."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question} Nobody is there to ask: say ragfuse store {command} --yes.")
    if not typer.confirm(question, err=True):
        Console(stderr=True).print("Nothing was changed.")
        raise typer.Exit(1)


@contextmanager
def bar_for(console: Console, doing: str, stopped: str) -> Iterator[Callable[[int, int], object]]:
    """Yield a function (done, total) that updates a progress bar; `stopped` is the message after Ctrl-C."""
    columns = (TextColumn(doing), BarColumn(20), DownloadColumn(), TimeRemainingColumn())
    with progress(console, *columns) as bar:
        task = bar.add_task(doing, total=None)
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(stopped) from stop
