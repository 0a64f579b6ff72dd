"""`ragfuse sessions`: conversations that are kept, looked after without their model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ragfuse.cli.entries import counted, plain
from ragfuse.cli.opened import opened
from ragfuse.cli.options import Json, Store, console_for, write_json
from ragfuse.errors import InputError
from ragfuse.settings import SINKS

sessions = typer.Typer(
    no_args_is_help=True,
    help="Look after conversations that are kept (`ragfuse ask --session`). While a salt is set (RAGFUSE_SALT), its "
    "tenant's alone are meant, without one those of all tenants. What a running process holds in memory stays there "
    "until it ends.",
)

Name = Annotated[str, typer.Argument(help="The session's name, as `ragfuse sessions ls` shows it.")]


@sessions.command("ls")
def ls(store: Store = None, json: Json = None) -> None:
    """List sessions, used last first."""
    console = console_for(json)
    with opened(store, console) as keeping:
        found = keeping.sessions.ls()
    table = Table("session", "turns", "tokens", "used", box=None, pad_edge=False)
    for info in found:
        table.add_row(Text(plain(info.id)), f"{info.turns:,}", f"{info.tokens:,}", _when(info.used))
    console.print(table if found else "No session is kept here. Begin one: ragfuse ask QUESTION --session NAME.")
    write_json({"sessions": [info.as_dict() for info in found]}, json)


@sessions.command("show")
def show(name: Name, store: Store = None, json: Json = None) -> None:
    """Show what was said."""
    console = console_for(json)
    with opened(store, console) as keeping:
        session, told = keeping.sessions.show(name), keeping.sessions.export(name)
    for message in session.messages:
        console.print(Text.assemble((f"{message.role}: ", "bold"), _lines(message.text)), soft_wrap=True)
    if session.dropped:
        console.print(f"Of {session.n_tokens:,} tokens, prompts no longer have {session.dropped:,}.", highlight=False)
    write_json(told, json)


@sessions.command("export")
def export(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Write it here as JSON ('-': standard output).")],
    store: Store = None,
) -> None:
    """Write all that is known of a session into a JSON file: messages, tokens, keys. KV: `ragfuse store export`."""
    console = console_for(path)
    with opened(store, console) as keeping:
        told = keeping.sessions.export(name)
    write_json(told, path)
    if str(path) != "-":
        console.print(f"Written: {path}", highlight=False, markup=False)


@sessions.command("rm")
def rm(
    names: Annotated[list[str] | None, typer.Argument(help="Names of sessions.")] = None,
    unused: Annotated[float | None, typer.Option(min=0, help="All that were not used for so many days.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Delete sessions and the KV that no other session has, in every tier."""
    if bool(names) == (unused is not None):
        raise InputError("Wanted what to delete: names of sessions, or --unused DAYS, one of both.")
    console = console_for(json)
    with opened(store, console) as keeping:
        if not yes and not typer.confirm("Delete what was said, for good?", err=True):
            raise typer.Exit(1)
        kept = keeping.sessions
        done = kept.delete(*names) if names else kept.expire(86400 * (unused or 0.0))
    kv = f"{counted(done.entries, 'entry', 'entries')} of KV ({done.nbytes / 1e6:,.1f} MB)"
    console.print(f"Deleted {counted(done.sessions, 'session')} and {kv}.", highlight=False, markup=False)
    for tier in done.silent:
        console.print(f"Tier {tier} does not answer: what it holds of them stays.", highlight=False, markup=False)
    write_json({"sessions": done.sessions, "entries": done.entries, "nbytes": done.nbytes}, json)


@sessions.command("truncate")
def truncate(
    name: Name,
    tokens: Annotated[int, typer.Option(min=0, help="So many tokens stay.")],
    sinks: Annotated[
        int, typer.Option(min=0, help="Of these, so many are the first ones of all; the others the last.")
    ] = SINKS,
    store: Store = None,
    json: Json = None,
) -> None:
    """Shorten what the next prompt has of a session. Nothing is computed again, and no KV changes."""
    console = console_for(json)
    with opened(store, console) as keeping:
        session = keeping.sessions.truncate(name, tokens, sinks)
    left = session.n_tokens - session.dropped
    console.print(f"The next prompt has {left:,} of {session.n_tokens:,} tokens.", highlight=False)
    write_json({"tokens": session.n_tokens, "dropped": session.dropped}, json)


def _when(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _lines(text: str) -> str:
    """A text with its line breaks, without anything that a terminal would obey."""
    return "\n".join(plain(line) for line in text.splitlines())
