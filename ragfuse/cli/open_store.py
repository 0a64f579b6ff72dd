"""The store of the settings, opened for commands that need no model; and what they ask before they
delete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from ragfuse.errors import InputError
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.cli.entries import OpenStore


@contextmanager
def open_kv(settings: Settings, console: Console, may_be_new: bool = False) -> Iterator[OpenStore]:
    """Open the store of the settings; InputError if it does not exist yet, unless `may_be_new`."""
    if (
        not may_be_new
        and not settings.tiers
        and settings.disk_bytes
        and not settings.store_path.exists()
    ):
        raise InputError(
            f"There is no store at '{settings.store_path}' yet. Fill it with `ragfuse ingest PATH`,"
            " or choose another folder with --store."
        )
    with console.status("opening the store"):
        from ragfuse.cli.entries import OpenStore

        kept = OpenStore(settings)
    with kept:
        yield kept


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation, unless `yes`; without a terminal the command ends there."""
    if not yes:
        typer.confirm(f"{question} (--yes does not ask)", abort=True, err=True)
