"""`ragfuse schema`: schemas of prompts in PML, encoded once, and looked after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ragfuse.cli.entries import counted, plain
from ragfuse.cli.ingest import progress
from ragfuse.cli.opened import opened
from ragfuse.cli.options import (
    Device,
    Dtype,
    Json,
    Model,
    ModelKwargs,
    Store,
    console_for,
    prepared,
    settings_of,
    write_json,
)
from ragfuse.cli.show import short
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine

schema = typer.Typer(
    no_args_is_help=True,
    help="Manage schemas, whose modules prompts in PML use (`ragfuse ask --pml FILE`). If a salt is set "
    "(RAGFUSE_SALT), these are the schemas of its tenant.",
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
    engine = _engine(settings, console)
    with engine:
        columns = TextColumn("encoding"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn()
        with progress(console, *columns) as bar:
            task = bar.add_task("encoding", total=None)
            found = engine.register(file, lambda done: bar.update(task, completed=done.chunks, total=done.of))
        refusal = engine.model.profile.refusal if not engine.model.profile.fixed else ""
    done, layout = found.done, found.layout
    if refusal:
        console.print(Text(f"No KV is kept of this model, it is answered by full prefill: {refusal}"))
    said = f"{counted(done.encoded, 'run')} of {done.chunks} encoded now ({done.nbytes / 1e6:,.1f} MB)"
    console.print(Text(f"'{plain(found.name)}': {layout.n_positions:,} positions; {said}, {done.seconds:.1f} s."))
    for note in layout.notes:
        console.print(Text(f"note: {plain(note)}"), soft_wrap=True)
    told = {"name": found.name, "positions": layout.n_positions, "runs": done.chunks, "encoded": done.encoded}
    write_json({**told, "tokens": done.tokens, "nbytes": done.nbytes, "notes": list(layout.notes)}, json)


@schema.command("ls")
def ls(store: Store = None, json: Json = None) -> None:
    """List the registered schemas."""
    console = console_for(json)
    with opened(store, console) as keeping:
        found = keeping.schemas.ls()
    table = Table("schema", "modules", "scaffolds", "file", box=None, pad_edge=False)
    for info in found:
        table.add_row(
            Text(plain(info.name)), f"{info.modules:,}", f"{info.scaffolds:,}", Text(short(plain(Path(info.file).name)))
        )
    console.print(table if found else "No schema is registered here. Register one: ragfuse schema add FILE.")
    write_json({"schemas": [info.as_dict() for info in found]}, json)


@schema.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a registered schema, or a PML file.")],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    png: Annotated[Path | None, typer.Option("--png", help="Draw the positions of all modules into this PNG.")] = None,
    json: Json = None,
) -> None:
    """Show the tree of a schema: position, tokens and KV bytes of every module."""
    settings, console = (
        settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store),
        console_for(json),
    )
    if png is not None:
        from ragfuse.calibration.plots import require_plotting

        require_plotting()
    engine = _engine(settings, console)
    with engine:
        from ragfuse.engine.schema_service import outline

        layout, per_token = engine.schemas.show(name), engine.model.nbytes_per_token
        rows = list(outline(layout, per_token))
    table = Table("module", box=None, pad_edge=False)
    for heading in ("positions", "tokens", "MB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    n_tokens = sum(len(run.tokens) for run in layout.runs)
    kept = f"{counted(len(layout.runs), 'run')} of {n_tokens:,} tokens, {n_tokens * per_token / 1e6:,.1f} MB of KV"
    console.print(f"{kept}; {per_token / 1e6:.4f} MB a token with {plain(settings.model)}.", highlight=False)
    for note in layout.notes:
        console.print(Text(f"note: {plain(note)}"), soft_wrap=True)
    if png is not None:
        _draw(rows, png)
        console.print(f"Written: {png}", highlight=False, markup=False)
    told = {"name": layout.schema.name, "positions": layout.n_positions, "tokens": n_tokens}
    told |= {"nbytes_per_token": per_token, "mb_per_token": per_token / 1e6, "parts": rows}
    write_json({**told, "notes": list(layout.notes)}, json)


@schema.command("rm")
def rm(
    name: Annotated[str, typer.Argument(help="Name of the schema, as `ragfuse schema ls` shows it.")],
    store: Store = None,
    json: Json = None,
) -> None:
    """Remove a schema, and its KV in every tier unless another schema uses it. Its file stays."""
    console = console_for(json)
    with opened(store, console) as keeping:
        nbytes = keeping.schemas.remove(name)
    console.print(Text(f"Removed '{plain(name)}' and {nbytes / 1e6:,.1f} MB of KV."))
    write_json({"name": name, "nbytes": nbytes}, json)


def _engine(settings: Settings, console: Console) -> Engine:
    prepared(settings)
    with console.status("loading the model"):
        from ragfuse.engine.engine import Engine

        engine = Engine(settings)
        try:
            engine.model  # noqa: B018 - it takes a while
        except BaseException:
            engine.close()
            raise
        return engine


def _cells(row: Mapping[str, Any]) -> tuple[Text, str, str, str]:
    """One line of the tree."""
    name = {"schema": "the schema's own text", "text": "text"}.get(
        row["what"]
    ) or f"{row['what']} {row.get('name', '')}"
    where = f"{row['start']:,}-{row['stop']:,}"
    nbytes = row.get("nbytes")
    tokens = f"{row.get('tokens', row['stop'] - row['start']):,}" if row["what"] != "union" else ""
    return Text("  " * row["depth"] + plain(name.strip())), where, tokens, f"{nbytes / 1e6:,.2f}" if nbytes else ""


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Every module as a bar over its positions, those of a union one below the other."""
    from ragfuse.calibration.plots import saved

    places = [row for row in rows if row["what"] in ("schema", "module")]
    with saved(path, (9, max(2.0, 0.32 * len(places)))) as figure:
        axes = figure.add_subplot()
        for line, row in enumerate(places):
            colour = "lightgrey" if row["what"] == "schema" else MODULE_COLOURS[row["depth"] % len(MODULE_COLOURS)]
            axes.barh(line, row["stop"] - row["start"], left=row["start"], color=colour, height=0.7)
        for row in rows:
            if row["what"] == "param":
                axes.axvspan(row["start"], row["stop"], color="black", alpha=0.08)
        axes.set_yticks(range(len(places)), [row["path"] or "the schema" for row in places], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("position (shaded: room for arguments)")
