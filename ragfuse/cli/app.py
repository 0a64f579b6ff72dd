"""The `ragfuse` command: its subcommands, and errors as one readable line instead of a traceback."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperGroup

from ragfuse.cli import ask, benches, checks, ingest, models
from ragfuse.errors import RagFuseError


class Door(TyperGroup):
    """Turns what ragfuse raises on purpose into a line on standard error, and Ctrl-C into exit status 130."""

    def invoke(self, ctx: typer.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RagFuseError as error:
            Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {_plain(str(error))}", highlight=False)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as stop:
            Console(stderr=True).print("\nStopped. What was finished is kept; the same command goes on from there.")
            raise typer.Exit(130) from stop


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


app = typer.Typer(
    cls=Door,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Answers over your documents whose first token comes sooner: each chunk's KV cache is computed once, stored, "
    "and fused with the others at question time.",
)
app.command("ingest")(ingest.ingest)
app.command("ask")(ask.ask)
app.command("verify")(checks.verify_model)
app.command("doctor")(checks.doctor)
app.command("demo")(benches.demo)
app.add_typer(benches.bench, name="bench")
app.add_typer(models.models, name="models")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Fuse cached chunks instead of prefilling them again."""
    if version:
        from importlib.metadata import version as installed

        print(f"ragfuse-kv {installed('ragfuse-kv')}")
        sys.exit(0)
