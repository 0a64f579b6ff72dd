"""`ragfuse schema`: register, list, show and remove schemas of prompts in PML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ragfuse.cli.engine import loaded_engine, open_kv
from ragfuse.cli.options import ENGINE, screen
from ragfuse.cli.show import counted, plain, progress_bar, say, short, show_table, when
from ragfuse.schemas.pml import read_schema
from ragfuse.settings import Settings
from ragfuse.types.sizes import size_text

schema = typer.Typer(
    no_args_is_help=True,
    help=(
        "Manage schemas in PML (Prompt Markup Language): texts that prompts import (`ragfuse ask"
        " --pml FILE`).\n\nIf RAGFUSE_SALT is set, commands apply only to its tenant."
    ),
)


@schema.command("add")
@screen(*ENGINE)
def add(
    console: Console,
    settings: Settings,
    file: Annotated[Path, typer.Argument(help="A schema in PML.")],
) -> dict[str, Any]:
    """Register a schema, and compute the KV of modules that are new or have changed."""
    read_schema(file)
    with loaded_engine(settings, console) as engine:
        with progress_bar(console, "encoding") as report:
            registered = engine.schemas.register(file, lambda done: report(done.chunks, done.of))
        refusal = engine.model.profile.refusal if not engine.model.profile.fixed else ""
    done, layout = registered.done, registered.layout
    if refusal:
        say(
            console,
            f"No KV is stored for this model; questions are answered by full prefill: {refusal}",
        )
    encoded = (
        f"{counted(done.encoded, 'run')} of {done.chunks} encoded now ({size_text(done.nbytes)})"
    )
    say(
        console,
        f"'{plain(registered.name)}': {layout.n_positions:,} positions; {encoded},"
        f" {done.seconds:.1f} s.",
    )
    return {
        "name": registered.name,
        "positions": layout.n_positions,
        "runs": done.chunks,
        "encoded": done.encoded,
        "tokens": done.tokens,
        "nbytes": done.nbytes,
    }


@schema.command("ls")
@screen("store")
def ls(console: Console, settings: Settings) -> dict[str, Any]:
    """List the registered schemas."""
    with open_kv(settings, console) as kept:
        found = kept.schemas.ls()
    if not found:
        say(console, "No schema is registered here. Register a schema: ragfuse schema add FILE.")
    show_table(
        console,
        [
            {"name": each.name, "file": short(Path(each.file).name), "added": when(each.added)}
            for each in found
        ],
    )
    return {
        "schemas": [{"name": each.name, "file": each.file, "added": each.added} for each in found]
    }


@schema.command("show")
@screen(*ENGINE)
def show(
    console: Console,
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Name of a registered schema, or a PML file.")],
) -> dict[str, Any]:
    """Show the modules of a schema: first and last position, tokens, parameters and KV bytes."""
    with loaded_engine(settings, console) as engine:
        from ragfuse.schemas.layout import outline

        layout, per_token = engine.schemas.show(name), engine.model.nbytes_per_token
        modules = outline(layout, per_token)
    rows = [
        {
            "module": plain(row["module"]),
            "positions": f"{row['start']:,}-{row['stop'] - 1:,}",
            "tokens": row["tokens"],
            "parameters": ", ".join(row["parameters"]),
            "nbytes": row["nbytes"],
        }
        for row in modules
    ]
    show_table(console, rows)
    n_tokens = sum(len(run.tokens) for run in layout.runs)
    summary = (
        f"{n_tokens:,} tokens in {counted(len(layout.runs), 'piece')},"
        f" {size_text(n_tokens * per_token)} of KV"
    )
    say(console, f"{summary}; {size_text(per_token)} a token with {plain(settings.model)}.")
    return {
        "name": layout.schema.name,
        "positions": layout.n_positions,
        "tokens": n_tokens,
        "nbytes_per_token": per_token,
        "modules": modules,
    }


@schema.command("rm")
@screen("store")
def rm(
    console: Console,
    settings: Settings,
    name: Annotated[
        str, typer.Argument(help="Name of the schema, as `ragfuse schema ls` shows it.")
    ],
) -> dict[str, Any]:
    """Remove a schema and the KV that no other schema uses. The PML file is not deleted."""
    with open_kv(settings, console) as kept:
        nbytes = kept.schemas.remove(name)
    say(console, f"Removed '{plain(name)}' and {size_text(nbytes)} of KV.")
    return {"name": name, "nbytes": nbytes}
