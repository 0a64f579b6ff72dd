"""`ragfuse schema`: register, list, show and remove schemas of prompts in PML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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
    option,
    require_writable,
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

MODULE_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:olive")


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
    settings, console = (
        settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store),
        console_for(json),
    )
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
    for note in layout.notes:
        console.print(Text(f"note: {plain(note)}"), soft_wrap=True)
    payload = {"name": registered.name, "positions": layout.n_positions, "runs": done.chunks, "encoded": done.encoded}
    write_json({**payload, "tokens": done.tokens, "nbytes": done.nbytes, "notes": list(layout.notes)}, json)


@schema.command("ls")
def ls(store: Store = None, json: Json = None) -> None:
    """List the registered schemas."""
    console = console_for(json)
    with open_admin(store, console) as admin:
        infos = admin.schemas.ls()
    table = Table("schema", "modules", "scaffolds", "file", box=None, pad_edge=False)
    for info in infos:
        table.add_row(
            Text(plain(info.name)), f"{info.modules:,}", f"{info.scaffolds:,}", Text(short(plain(Path(info.file).name)))
        )
    console.print(table if infos else "No schema is registered here. Register one: ragfuse schema add FILE.")
    write_json({"schemas": [info.as_dict() for info in infos]}, json)


@schema.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a registered schema, or a PML file.")],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    png: Annotated[
        Path | None, option("--png", "Draw the positions of all modules into this PNG.", "none is drawn")
    ] = None,
    json: Json = None,
) -> None:
    """Show the tree of a schema: first and last position, tokens and KV bytes of every module."""
    settings, console = (
        settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store),
        console_for(json),
    )
    if png is not None:
        from ragfuse.calibration.plots import require_plotting

        require_plotting()
    require_writable(png)
    with loaded_engine(settings, console, lambda engine: engine.schemas.named(name)) as engine:
        from ragfuse.engine.schema_service import outline

        layout, per_token = engine.schemas.show(name), engine.model.nbytes_per_token
        parts = list(outline(layout, per_token))
    table = Table("module", box=None, pad_edge=False)
    for heading in ("positions", "tokens", "size"):
        table.add_column(heading, justify="right")
    for part in parts:
        table.add_row(*_table_row(part))
    console.print(table)
    n_tokens = sum(len(run.tokens) for run in layout.runs)
    summary = f"{counted(len(layout.runs), 'run')} of {n_tokens:,} tokens, {size_text(n_tokens * per_token)} of KV"
    console.print(f"{summary}; {size_text(per_token)} a token with {plain(settings.model)}.", highlight=False)
    for note in layout.notes:
        console.print(Text(f"note: {plain(note)}"), soft_wrap=True)
    if png is not None:
        _draw_positions(parts, png)
        console.print(f"Written: {png}", highlight=False, markup=False)
    payload = {"name": layout.schema.name, "positions": layout.n_positions, "tokens": n_tokens}
    payload |= {"nbytes_per_token": per_token, "mb_per_token": per_token / 1e6, "parts": parts}
    write_json({**payload, "notes": list(layout.notes)}, json)


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


def _table_row(part: Mapping[str, Any]) -> tuple[Text, str, str, str]:
    """Return a part of a schema as a row of the table."""
    unnamed = {"schema": "the schema's own text", "text": "text"}
    name = unnamed.get(part["what"]) or f"{part['what']} {part.get('name', '')}"
    positions = f"{part['start']:,}-{part['stop'] - 1:,}" if part["stop"] > part["start"] else "none"
    nbytes = part.get("nbytes")
    tokens = f"{part.get('tokens', part['stop'] - part['start']):,}" if part["what"] != "union" else ""
    return Text("  " * part["depth"] + plain(name.strip())), positions, tokens, size_text(nbytes) if nbytes else ""


def _draw_positions(parts: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw each module as a bar over its positions into a PNG, and shade the positions of parameters."""
    from ragfuse.calibration.plots import saved

    modules = [part for part in parts if part["what"] in ("schema", "module")]
    with saved(path, (9, max(2.0, 0.32 * len(modules)))) as figure:
        axes = figure.add_subplot()
        for y, part in enumerate(modules):
            colour = "lightgrey" if part["what"] == "schema" else MODULE_COLOURS[part["depth"] % len(MODULE_COLOURS)]
            axes.barh(y, part["stop"] - part["start"], left=part["start"], color=colour, height=0.7)
        for part in parts:
            if part["what"] == "param":
                axes.axvspan(part["start"], part["stop"], color="black", alpha=0.08)
        axes.set_yticks(range(len(modules)), [part["path"] or "the schema" for part in modules], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("position (shaded: space for arguments)")
