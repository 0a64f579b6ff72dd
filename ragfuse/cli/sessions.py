"""`ragfuse sessions`: manage stored conversations, without loading a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ragfuse.cli.engine import confirm, open_kv
from ragfuse.cli.options import Yes, screen
from ragfuse.cli.show import counted, plain, say, show_table, when
from ragfuse.settings import Settings
from ragfuse.types.sizes import size_text

sessions = typer.Typer(
    no_args_is_help=True,
    help=(
        "Manage stored conversations (`ragfuse chat --session`, `ragfuse ask --session`).\n\nIf"
        " RAGFUSE_SALT is set, commands apply to the sessions of its tenant; if not, to the"
        " sessions of all tenants. Running processes keep the sessions that they hold in memory."
    ),
)

Name = Annotated[
    str, typer.Argument(help="Name of the session, as `ragfuse sessions ls` shows it.")
]


@sessions.command("ls")
@screen("store")
def ls(console: Console, settings: Settings) -> dict[str, Any]:
    """List sessions, most recently used first."""
    with open_kv(settings, console) as kept:
        infos = kept.sessions.ls()
    if not infos:
        say(console, "No session is stored here. Start a session: ragfuse chat --session NAME.")
    show_table(
        console,
        [
            {
                "session": each.id,
                "turns": each.turns,
                "tokens": each.tokens,
                "used": when(each.used),
            }
            for each in infos
        ],
    )
    return {"sessions": [info.as_dict() for info in infos]}


@sessions.command("show")
@screen("store")
def show(console: Console, settings: Settings, name: Name) -> dict[str, Any]:
    """Show a session's messages; --json adds the session's token ids and KV keys."""
    with open_kv(settings, console) as kept:
        session, payload = kept.sessions.show(name), kept.sessions.export(name)
    for message in session.messages:
        text = "\n".join(map(plain, message.text.splitlines()))
        console.print(Text.assemble((f"{message.role}: ", "bold"), text), soft_wrap=True)
    if session.dropped:
        say(console, f"Left out of prompts: {session.dropped:,} of {session.n_tokens:,} tokens.")
    return payload


@sessions.command("rm")
@screen("store")
def rm(
    console: Console,
    settings: Settings,
    names: Annotated[list[str], typer.Argument(help="Names of sessions.")],
    yes: Yes = False,
) -> dict[str, Any]:
    """Delete sessions. KV that only these sessions use is deleted from every tier.

    If RAGFUSE_SESSION_TTL_S is set, unused sessions expire after that number of seconds.
    """
    with open_kv(settings, console) as kept:
        confirm("Delete these conversations for good?", yes)
        deleted = kept.sessions.delete(*names)
    kv = f"{counted(deleted.entries, 'entry', 'entries')} of KV ({size_text(deleted.nbytes)})"
    say(console, f"Deleted {counted(deleted.sessions, 'session')} and {kv}.")
    for tier in deleted.silent:
        say(console, f"Tier {tier} does not answer: KV of these sessions may remain there.")
    return {"sessions": deleted.sessions, "entries": deleted.entries, "nbytes": deleted.nbytes}
