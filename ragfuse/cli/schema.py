"""`ragfuse schema`: register, list, show and remove schemas of prompts in PML."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.open_store import open_admin
from ragfuse.cli.options import (
    Device,
    Dtype,
    Json,
    Model,
    ModelKwargs,
    Store,
    console_for,
    settings_of,
    write_json,
)
from ragfuse.cli.show import counted, plain, short
from ragfuse.schemas.pml import read_schema
from ragfuse.telemetry.progress import progress
from ragfuse.types.sizes import size_text

schema = typer.Typer(
    no_args_is_help=True,
    help="Look after schemas in PML (Prompt Markup Language): texts in modules, which prompts import "
    "(`ragfuse ask --pml FILE`).\n\nIf a salt is set (RAGFUSE_SALT), these are the schemas of its tenant.",
)

NAMELESS = MappingProxyType({"schema": "the schema's own text", "text": "text"})
"""What parts of a schema without a name are called."""


@schema.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="A schema in PML.")],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    json: Json = None,
) -> None:
    """Register a schema and compute the KV of its modules; for an edited schema, only of modules that changed."""
    settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
    console = console_for(json)
    read_schema(file)
    with loaded_engine(settings, console) as engine:
        columns = TextColumn("encoding"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
        with progress(console, *columns) as bar:
            task = bar.add_task("encoding", total=None)
            registered = engine.schemas.register(
                file, lambda done: bar.update(task, completed=done.chunks, total=done.of)
            )
        refusal = engine.model.profile.refusal if not engine.model.profile.fixed else ""
    done, layout = registered.done, registered.layout
    if refusal:
        console.print(Text(f"No KV is stored for this model; questions are answered by full prefill: {refusal}"))
    encoded = f"{counted(done.encoded, 'run')} of {done.chunks} encoded now ({size_text(done.nbytes)})"
    console.print(
        Text(f"'{plain(registered.name)}': {layout.n_positions:,} positions; {encoded}, {done.seconds:.1f} s.")
    )
    payload = {"name": registered.name, "positions": layout.n_positions, "runs": done.chunks, "encoded": done.encoded}
    write_json({**payload, "tokens": done.tokens, "nbytes": done.nbytes}, json)


@schema.command("ls")
def ls(store: Store = None, json: Json = None) -> None:
    """List the registered schemas."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        found = admin.schemas.ls()
    table = Table("schema", "file", box=None, pad_edge=False)
    for each in found:
        table.add_row(Text(plain(each.name)), Text(short(plain(Path(each.file).name))))
    console.print(table if found else "No schema is registered here. Register one: ragfuse schema add FILE.")
    write_json({"schemas": [{"name": each.name, "file": each.file, "added": each.added} for each in found]}, json)


@schema.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a registered schema, or a PML file.")],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    json: Json = None,
) -> None:
    """Show the tree of a schema: first and last position, tokens and KV bytes of every module."""
    settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
    console = console_for(json)
    with loaded_engine(settings, console, lambda engine: engine.schemas.named(name)) as engine:
        from ragfuse.engine.schema_service import outline

        layout, per_token = engine.schemas.show(name), engine.model.nbytes_per_token
        parts = list(outline(layout, per_token))
    table = Table("module", box=None, pad_edge=False)
    for heading in ("positions", "tokens", "size"):
        table.add_column(heading, justify="right")
    for part in parts:
        name = NAMELESS.get(part["what"]) or f"{part['what']} {part.get('name', '')}"
        n = part["stop"] - part["start"]
        positions = f"{part['start']:,}-{part['stop'] - 1:,}" if n > 0 else "none"
        tokens = f"{part.get('tokens', n):,}" if part["what"] != "union" else ""
        size = size_text(part["nbytes"]) if part.get("nbytes") else ""
        table.add_row(Text("  " * part["depth"] + plain(name.strip())), positions, tokens, size)
    console.print(table)
    n_tokens = sum(len(run.tokens) for run in layout.runs)
    summary = f"{counted(len(layout.runs), 'run')} of {n_tokens:,} tokens, {size_text(n_tokens * per_token)} of KV"
    console.print(f"{summary}; {size_text(per_token)} a token with {plain(settings.model)}.", highlight=False)
    payload = {"name": layout.schema.name, "positions": layout.n_positions, "tokens": n_tokens}
    payload |= {"nbytes_per_token": per_token, "mb_per_token": per_token / 1e6, "parts": parts}
    write_json(payload, json)


@schema.command("rm")
def rm(
    name: Annotated[str, typer.Argument(help="Name of the schema, as `ragfuse schema ls` shows it.")],
    store: Store = None,
    json: Json = None,
) -> None:
    """Remove a schema, and its KV in every tier unless another schema uses it. Its file stays."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        nbytes = admin.schemas.remove(name)
    console.print(Text(f"Removed '{plain(name)}' and {size_text(nbytes)} of KV."))
    write_json({"name": name, "nbytes": nbytes}, json)
