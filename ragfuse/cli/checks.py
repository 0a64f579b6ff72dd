"""`ragfuse verify`, `calibrate` and `doctor`: is this model safe to fuse, how best, and is this machine ready."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.table import Table
from rich.text import Text

from ragfuse.cli.entries import counted
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import tell_skipped
from ragfuse.cli.options import Device, Dtype, Json, Model, Policy, Ratio, Store, console_for, settings_of, write_json
from ragfuse.models import list_models
from ragfuse.settings import Settings

if TYPE_CHECKING:
    from ragfuse.keeping import Place

EXTRAS = ("langchain-core", "langchain-community", "llama-index-core", "faiss-cpu", "sentence-transformers")


def verify_model(
    model: Annotated[str | None, typer.Argument(help="Embedded name, Hugging Face id or folder.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    policy: Policy = None,
    ratio: Ratio = None,
    json: Json = None,
) -> None:
    """Measure on the real weights that fusing is exact where it must be. Exit status 1 if it is not."""
    settings = settings_of(model=model, dtype=dtype, device=device, policy=policy, ratio=ratio)
    console = console_for(json)
    with console.status("loading the model"):
        from ragfuse.engine import Engine
    with Engine(settings) as engine:
        verdict = engine.verify()
    table = Table("check", "error", "bound", "", box=None)
    for check in verdict.checks:
        mark = "[green]passed[/]" if check.passed else "[red]failed[/]"
        table.add_row(check.name, f"{check.error:.2g}", f"{check.bound:.2g}", mark)
    console.print(table)
    says = "can be fused" if verdict.passed else "is not fused: every prompt is answered by full prefill"
    console.print(f"[bold]{verdict.model}[/] {says}.", highlight=False)
    write_json(verdict.as_dict(), json)
    raise typer.Exit(0 if verdict.passed else 1)


def calibrate_model(
    docs: Annotated[list[Path], typer.Option(help="Files or folders of your documents: txt, md, rst, html, pdf.")],
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    store: Store = None,
    questions: Annotated[int, typer.Option(min=12, help="Questions made from the documents.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Measure how close fused answers stay to full prefill's on your documents; choose policy and ratio by it.

    Exit status 1 where no choice is safe: then prompts are answered by full prefill.
    """
    from ragfuse.bench.runner import tune_malloc

    settings = settings_of(model=model, dtype=dtype, device=device, store=store)
    console, found = console_for(json), find_files(docs)
    tune_malloc(console)
    tell_skipped(console, found)
    with console.status("loading the model"):
        from ragfuse.bench.calibrate import calibrate, draw_calibration, made_cases, show_calibration
        from ragfuse.bench.plots import require_plotting
        from ragfuse.cli.library import cut
        from ragfuse.engine import Engine
    if plot is not None:
        require_plotting()
    with Engine(settings) as engine:
        with console.status("reading the documents"):
            texts = [(str(file), list(cut(file, settings, engine.model.words))) for file in found.files]
        cases = made_cases(texts, questions)
        with console.status("looking whether fusing is exact"):
            verified = engine.verify().passed
        result = calibrate(engine.model, cases, console, settings.model, verified)
        chosen = (result["policy"], result["ratio"]) if result["safe"] else ("", None)
        engine.learn(engine.profile.calibrated(result["safe"], *chosen))
        is_kept = engine.book is not None
    show_calibration(result, console)
    if not is_kept:
        console.print("[yellow]Not kept[/]: without a disk tier there is no place for it (disk_bytes is 0).")
    if plot is not None:
        draw_calibration(result, plot)
        console.print(f"Written: {plot}", highlight=False)
    write_json(result, json)
    raise typer.Exit(0 if result["safe"] else 1)


def doctor(json: Json = None) -> None:
    """Look at this machine, each tier of the store and the models; exit status 1 if something needs mending."""
    settings, console = settings_of(), console_for(json)
    rows = [*_machine(), *_folders(settings), *_tiers(settings), *_packages(), *_models(settings)]
    table = Table("", "what", "found", box=None)
    for good, what, found in rows:
        table.add_row("[green]ok[/]" if good else "[red]!![/]", what, Text(found))
    console.print(table)
    write_json({"ok": all(row[0] for row in rows), "rows": [list(row) for row in rows]}, json)
    raise typer.Exit(0 if all(row[0] for row in rows) else 1)


Row = tuple[bool, str, str]


def _machine() -> list[Row]:
    import torch

    memory = psutil.virtual_memory()
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU only)"
    return [
        (True, "Python", platform.python_version()),
        (True, "cores", f"{os.cpu_count()}, {torch.get_num_threads()} used by torch"),
        (memory.available > 2e9, "memory", f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f}"),
        (True, "CUDA device", cuda),
    ]


def _folders(settings: Settings) -> list[Row]:
    rows: list[Row] = []
    for what, folder in (("home", settings.home), ("store", settings.store_path)):
        there = next(parent for parent in (folder.expanduser(), *folder.expanduser().parents) if parent.exists())
        writable = os.access(there, os.W_OK) and there.is_dir()
        free = shutil.disk_usage(there).free
        state = f"{folder} ({free / 1e9:.0f} GB free)" if writable else f"{folder} cannot be written; set RAGFUSE_HOME"
        rows.append((writable, what, state))
    return rows


def _tiers(settings: Settings) -> list[Row]:
    """A row for each tier that outlives a process: whether it answers, what it holds, and what to do where not."""
    from ragfuse.keeping import look

    return [(place.answers, f"tier {place.name}", _state(place)) for place in look(settings)]


def _state(place: Place) -> str:
    if place.wrong:
        return place.wrong
    if not place.answers:
        return f"{place.where} does not answer: start it or mend the way to it, or take it out of the setting tiers"
    entries = counted(place.entries, "entry", "entries") if place.entries else "no entries yet"
    return f"answers: {entries}, {place.nbytes / 1e6:,.1f} of {place.capacity / 1e6:,.0f} MB ({place.where})"


def _packages() -> list[Row]:
    return [(_version(name) != "", name, _version(name) or "missing") for name in ("torch", "transformers")] + [
        (True, name, _version(name) or "not installed (only needed for some commands)") for name in EXTRAS
    ]


def _models(settings: Settings) -> list[Row]:
    return [(True, f"model {s.model.name}", s.state) for s in list_models(settings.home)]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
