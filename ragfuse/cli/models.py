"""`ragfuse models`: the included models."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.options import screen
from ragfuse.cli.show import show_table
from ragfuse.settings import Settings

models = typer.Typer(
    no_args_is_help=True,
    help="Included models: LLMs and embedders in Python packages, so nothing is downloaded.",
)


@models.command("ls")
@screen()
def ls(console: Console, settings: Settings) -> dict[str, Any]:
    """List the included models, with their role, state and size."""
    from ragfuse.models import list_models

    rows = [
        {
            "name": status.model.name,
            "role": status.model.role,
            "state": status.state,
            "nbytes": status.nbytes,
            "what": status.model.what,
        }
        for status in list_models(settings.home)
    ]
    show_table(console, rows)
    return {"models": rows}


@models.command("path")
@screen()
def path(
    console: Console,
    settings: Settings,
    name: Annotated[
        str, typer.Argument(help="Name of an included model, as `ragfuse models ls` lists it.")
    ],
) -> None:
    """Print the folder of an included model; prepare the model first if necessary."""
    from ragfuse.models import prepare

    print(prepare(name, settings.home))
