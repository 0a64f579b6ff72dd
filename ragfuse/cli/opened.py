"""Helpers of the `ragfuse store` commands: open the store, select entries, ask for confirmation, show progress."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from ragfuse.cli.options import settings_of
from ragfuse.errors import InputError, StoreError
from ragfuse.telemetry.progress import progress

if TYPE_CHECKING:
    from ragfuse.admin.store_admin import EntryFilter, EntryRow, StoreAdmin


@contextmanager
def open_admin(folder: Path | None, console: Console, may_be_new: bool = False) -> Iterator[StoreAdmin]:
    """Open the store of the settings; InputError if it does not exist yet, unless `may_be_new`."""
    settings = settings_of(store=folder)
    if not may_be_new and not settings.tiers and settings.disk_bytes and not _is_there(settings.store_path):
        raise InputError(
            f"There is no store at '{settings.store_path}' yet. Fill it with `ragfuse ingest PATH`, or "
            "choose another folder with --store."
        )
    with console.status("opening the store"):
        from ragfuse.admin.store_admin import StoreAdmin

        admin = StoreAdmin(settings)
    with admin:
        yield admin


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # opening the store reports the error
        return True


def entry_filter_of(
    keys: Sequence[str] | None,
    tier: str | None,
    source: str | None,
    model: str | None,
    tenant: str | None,
    all_: bool = False,
    verb: str = "",
) -> EntryFilter:
    """Return the filter that the options describe.

    Args:
        keys: Beginnings of chunk keys.
        tier: Name of a tier.
        source: Part of the source.
        model: A model's name, or the beginning of a digest.
        tenant: A salt.
        all_: Whether --all was given.
        verb: The verb of a command that needs either conditions or --all; "": the command needs neither.

    Raises:
        InputError: `verb` is given, and there are neither conditions nor --all, or both.
    """
    from ragfuse.admin.store_admin import EntryFilter

    entry_filter = EntryFilter(tuple(keys or ()), tier, model, tenant, source)
    if verb and entry_filter.selects_all != all_:
        found = "--all together with others" if all_ else "nothing"
        raise InputError(
            f"Say what to {verb}: first characters of keys, --tier, --source, --model or --tenant; or --all alone. "
            f"Found {found}."
        )
    return entry_filter


def select_entries(
    admin: StoreAdmin, console: Console, entry_filter: EntryFilter | None, participle: str = ""
) -> list[EntryRow]:
    """Return the selected entries, of one tenant if a salt is set, and print which tiers do not answer.

    With `participle` (what the command does, such as "moved"), raise StoreError if nothing was found and a selected
    tier does not answer.
    """
    from ragfuse.admin.store_admin import EntryFilter

    if entry_filter is not None:
        entry_filter = admin.within_tenant(entry_filter)
    with console.status("reading the store"):
        rows = admin.list_entries(entry_filter or EntryFilter())
        silent, silent_selected = admin.silent(), admin.silent(entry_filter or EntryFilter())
    if participle and silent_selected and not rows:
        refuse(silent_selected, f"its entries are not known, and nothing was {participle}")
    for name in silent:
        console.print(f"Tier {name} does not answer: its entries are not listed.", highlight=False, markup=False)
    if not rows and entry_filter is not None and not silent_selected:
        nothing = "Nothing in the store matches"
        message = "The store is empty: ragfuse ingest PATH."
        if entry_filter.tenant is not None and entry_filter == admin.within_tenant(replace(entry_filter, tenant=None)):
            message = f"{nothing} for the salt that is set; --tenant SALT selects another tenant, no salt selects all."
        elif not entry_filter.selects_all:
            message = f"{nothing}; `ragfuse store ls` lists all."
        console.print(message, highlight=False)
    return rows


def refuse(silent: Sequence[str], consequence: str) -> NoReturn:
    """Raise StoreError: these tiers do not answer, with this consequence."""
    from ragfuse.admin.store_admin import unanswered

    raise StoreError(unanswered(silent, consequence))


def confirm(question: str, yes: bool, context: typer.Context) -> None:
    """Ask for confirmation, unless `yes`; InputError without a terminal to ask at, with the command that needs none."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            f"{question} There is no terminal to confirm this at. Add --yes: {given_command(context)} --yes"
        )
    if not typer.confirm(question, err=True):
        Console(stderr=True).print("Nothing was changed.")
        raise typer.Exit(1)


def given_command(context: typer.Context) -> str:
    """Return the command that runs, with the arguments and options that it was given, as a shell reads it."""
    names, parent = [context.info_name or ""], context.parent
    while parent is not None and parent.parent is not None:
        names, parent = [parent.info_name or "", *names], parent.parent
    words = ["ragfuse", *names]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        found = context.params[name]
        values = [str(value) for value in (found if isinstance(found, (list, tuple)) else [found])]
        if parameter.param_type_name == "argument":
            words += values
        elif isinstance(found, bool):
            words.append(parameter.opts[0] if found else parameter.secondary_opts[0])
        else:
            words += [word for value in values for word in (parameter.opts[0], value)]
    return shlex.join(words)


@contextmanager
def progress_bar(console: Console, label: str, stopped: str) -> Iterator[Callable[[int, int], object]]:
    """Yield a function (done, total) that updates a progress bar; `stopped` is the message after Ctrl-C."""
    columns = (TextColumn(label), BarColumn(20), DownloadColumn(), TimeRemainingColumn())
    with progress(console, *columns) as bar:
        task = bar.add_task(label, total=None)
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(stopped) from stop
