"""`ragfuse measure` and `ragfuse explain`: how fast this machine is, and how prompts are planned with that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ragfuse.cli.ask import prompt_for
from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.ingest import target_tiers
from ragfuse.cli.options import (
    Deadline,
    Device,
    Dtype,
    Index,
    Json,
    Model,
    ModelKwargs,
    Overflow,
    Policy,
    Ratio,
    Store,
    TopK,
    console_for,
    option,
    settings_of,
    write_json,
)
from ragfuse.errors import InputError
from ragfuse.telemetry.progress import progress

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine
    from ragfuse.plan.cost import CostModel


def measure(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Annotated[
        list[str] | None,
        option("--store", "Folder or URL of a tier to measure; repeat for several.", "those in the settings"),
    ] = None,
    json: Json = None,
) -> None:
    """Time this machine with this model and each tier. Later plans, of what to read and what to compute, use it."""
    folder = next((each for each in store or () if "://" not in each), None)  # the disk tier
    others = [each for each in store or () if each != folder]
    settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=folder)
    console = console_for(json)
    with loaded_engine(settings, console) as engine:
        name = engine.model.name
        columns = TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn()
        with progress(console, *columns) as bar:
            task = bar.add_task("measuring", total=1.0)
            machine = engine.timings.measure(
                engine.model,
                engine.store,
                engine.settings,
                others,
                lambda what, done: bar.update(task, description=what, completed=done),
            )
        is_kept, notes = engine.catalog.file is not None, list(_notes(engine))
    _show(machine, name, console)
    if is_kept:
        console.print(
            f"Saved in {settings.store_path}; from now on prompts are planned by these timings.", highlight=False
        )
    else:
        console.print("[yellow]Not saved[/]: there is no disk tier to save it in (disk_bytes is 0).")
    for note in notes:
        console.print(note, highlight=False, markup=False)
    write_json(machine.as_dict(), json)


def explain(
    question: Annotated[str, typer.Argument(help="The question.")],
    index: Index = "default",
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    policy: Policy = None,
    ratio: Ratio = None,
    top_k: TopK = None,
    overflow: Overflow = None,
    deadline: Deadline = None,
    json: Json = None,
) -> None:
    """Show, without answering, what a question would read and compute, why, and how long that would take."""
    if not question.strip():
        raise InputError('The question is empty. Ask something: ragfuse explain "Who built the bridge?"')
    given = {
        "model": model,
        "dtype": dtype,
        "device": device,
        "model_kwargs": model_kwargs,
        "store": store,
        "policy": policy,
        "ratio": ratio,
    }
    settings, console = settings_of(**given, top_k=top_k, overflow=overflow), console_for(json)
    from ragfuse.cli.library import Library
    from ragfuse.engine.ask import Ask

    library = Library(settings, index)
    library.require()
    with loaded_engine(settings, console) as engine:
        prompt, _ = prompt_for(engine, library, question, console)
        plan = engine.plan(prompt, Ask(deadline_s=deadline))
    from ragfuse.cli.show import plain
    from ragfuse.plan.explanation import as_dict, in_words

    words = in_words(plan, name_of=lambda source: plain(Path(source).name))
    console.print(words, markup=False, highlight=False, soft_wrap=True)
    write_json({"question": question, **as_dict(plan), "words": words}, json)


def _notes(engine: Engine) -> Iterator[str]:
    """Yield what was chosen for new chunks by the measurements: tiers, where there are several, and codec levels."""
    n_tokens, slow = engine.settings.chunk_tokens, [tier.name for tier in engine.store.tiers if tier.slow]
    targets = target_tiers(engine, n_tokens)
    if len(slow) > 1:
        alone = "" if targets == slow else ", the cheapest that is fast enough; RAGFUSE_PLACEMENT=all writes to all"
        yield f"New chunks of {n_tokens} tokens go to {', '.join(targets)}{alone}."
    levels = engine.runtime.encoder.levels(n_tokens, n_tokens * engine.model.nbytes_per_token)
    for tier, (level,) in levels.items():
        yield (
            f"New chunks of {n_tokens} tokens are written into {tier} as {level}: the least lossy level that "
            "loads no slower than the model computes or, if there is none, the one that loads fastest."
        )


def _show(machine: CostModel, name: str, console: Console) -> None:
    """Print the measurements as tables."""
    threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
    table = Table(title=f"Full prefill of {Path(name).name}, {threads}")
    for column in ("tokens", "measured s", "fitted s"):
        table.add_column(column, justify="right")
    for tokens, seconds in machine.prefill_points:
        table.add_row(f"{tokens:,}", f"{seconds:.3f}", f"{machine.prefill_s(tokens):.3f}")
    console.print(table)
    table = Table(title="Tiers, read past the file cache where the system allows it")
    for column in ("tier", "a read ms", "reading MB/s"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier, speed in machine.tiers.items():
        table.add_row(tier, f"{1000 * speed.read_s:.2f}", _mbps(speed.byte_s))
    console.print(table)
    console.print("Later answers correct these times.", highlight=False)
    _show_levels(machine, console)


def _show_levels(machine: CostModel, console: Console) -> None:
    """Print the decoding time and the size of each codec level."""
    if not machine.decode:
        return
    table = Table(title="Codec levels")
    for column in ("level", "decoding us a token", "bytes of raw's"):
        table.add_column(column, justify="left" if column == "level" else "right")
    for level, token_s in machine.decode.items():
        table.add_row(level, f"{1e6 * token_s:,.2f}", f"{machine.packed.get(level, 1.0):.2f}")
    console.print(table)


def _mbps(byte_s: float) -> str:
    """Return megabytes (10^6 bytes) per second, or that reading costs nothing, from seconds per byte."""
    return f"{1e-6 / byte_s:,.0f}" if byte_s > 1e-11 else "shared, not copied"
