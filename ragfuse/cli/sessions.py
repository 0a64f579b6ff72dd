"""`ragfuse sessions`: manage stored conversations, without loading a model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ragfuse.cli.open_store import confirm, open_admin
from ragfuse.cli.options import Json, Store, Yes, console_for, option, write_json
from ragfuse.cli.show import counted, plain
from ragfuse.errors import InputError
from ragfuse.settings import SINKS
from ragfuse.types.sizes import size_text

sessions = typer.Typer(
    no_args_is_help=True,
    help="Look after stored conversations (`ragfuse chat --session`, `ragfuse ask --session`).\n\nIf a salt is set "
    "(RAGFUSE_SALT), commands apply to the sessions of its tenant, else to those of all tenants. Running processes "
    "keep what they hold in memory.",
)

Name = Annotated[str, typer.Argument(help="Name of the session, as `ragfuse sessions ls` shows it.")]


@sessions.command("ls")
def ls(store: Store = None, json: Json = None) -> None:
    """List sessions, most recently used first."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        infos = admin.sessions.ls()
    table = Table("session", "turns", "tokens", "used", box=None, pad_edge=False)
    for info in infos:
        table.add_row(Text(plain(info.id)), f"{info.turns:,}", f"{info.tokens:,}", _when(info.used))
    console.print(table if infos else "No session is stored here. Start one: ragfuse chat --session NAME.")
    write_json({"sessions": [info.as_dict() for info in infos]}, json)


@sessions.command("show")
def show(name: Name, store: Store = None, json: Json = None) -> None:
    """Show the messages of a session; --json has its tokens and keys as well. For its KV: `ragfuse store export`."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        session, payload = admin.sessions.show(name), admin.sessions.export(name)
    for message in session.messages:
        console.print(Text.assemble((f"{message.role}: ", "bold"), _lines(message.text)), soft_wrap=True)
    if session.dropped:
        console.print(f"Prompts leave out {session.dropped:,} of its {session.n_tokens:,} tokens.", highlight=False)
    write_json(payload, json)


@sessions.command("rm")
def rm(
    names: Annotated[list[str] | None, typer.Argument(help="Names of sessions.", show_default="none")] = None,
    unused: Annotated[
        float | None, option("--unused", "Delete all sessions unused for this many days.", "none", min=0)
    ] = None,
    yes: Yes = False,
    store: Store = None,
    json: Json = None,
) -> None:
    """Delete sessions, and their KV in every tier unless another session uses it."""
    if bool(names) == (unused is not None):
        raise InputError("Say what to delete: either names of sessions, or --unused DAYS, not both.")
    console = console_for(json)
    with open_admin(store, console) as admin:
        confirm("Delete these conversations for good?", yes)
        session_store = admin.sessions
        deleted = session_store.delete(*names) if names else session_store.expire(86400 * (unused or 0.0))
    kv = f"{counted(deleted.entries, 'entry', 'entries')} of KV ({size_text(deleted.nbytes)})"
    console.print(f"Deleted {counted(deleted.sessions, 'session')} and {kv}.", highlight=False, markup=False)
    for tier in deleted.silent:
        console.print(
            f"Tier {tier} does not answer: KV of these sessions may stay there.", highlight=False, markup=False
        )
    write_json({"sessions": deleted.sessions, "entries": deleted.entries, "nbytes": deleted.nbytes}, json)


@sessions.command("truncate")
def truncate(
    name: Name,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to keep.")],
    sinks: Annotated[
        int,
        typer.Option(
            min=0, help="How many of --tokens are taken from the beginning of the session; the rest from its end."
        ),
    ] = SINKS,
    store: Store = None,
    json: Json = None,
) -> None:
    """Shorten the history that the next prompt of a session includes. Nothing is recomputed, and no KV changes."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        session = admin.sessions.truncate(name, tokens, sinks)
    remaining = session.n_tokens - session.dropped
    console.print(f"The next prompt has {remaining:,} of {session.n_tokens:,} tokens.", highlight=False)
    write_json({"tokens": session.n_tokens, "dropped": session.dropped}, json)


def _when(seconds: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _lines(text: str) -> str:
    """Return a text with its line breaks, without control characters that a terminal would interpret."""
    return "\n".join(plain(line) for line in text.splitlines())
