"""`ragfuse models`: the embedded models."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ragfuse.cli.options import Json, console_for, settings_of, write_json
from ragfuse.types.sizes import size_text

models = typer.Typer(
    no_args_is_help=True,
    help="The embedded models: LLMs and embedders that come in Python packages, without a download from a hub.",
)


@models.command("ls")
def ls(json: Json = None) -> None:
    """List the embedded models, with their role, state and size."""
    from ragfuse.models import list_models

    found = list_models(settings_of().home)
    table = Table("name", "role", "state", "size", "what", box=None)
    for status in found:
        model = status.model
        table.add_row(model.name, model.role, status.state, size_text(status.nbytes), model.what)
    console_for(json).print(table)
    rows = [{"name": s.model.name, "role": s.model.role, "state": s.state, "nbytes": s.nbytes} for s in found]
    write_json({"models": rows}, json)


@models.command("path")
def path(
    name: Annotated[str, typer.Argument(help="Name of an embedded model, as `ragfuse models ls` lists it.")],
) -> None:
    """Print the folder of an embedded model, after preparing it if needed."""
    from ragfuse.models import prepare

    print(prepare(name, settings_of().home))
