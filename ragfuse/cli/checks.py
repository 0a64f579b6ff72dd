"""`ragfuse verify` and `calibrate`: is this model safe to fuse, and how best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ragfuse.cli.engine import loaded_engine
from ragfuse.cli.files import find_files
from ragfuse.cli.ingest import split_documents
from ragfuse.cli.options import (
    Device,
    Documents,
    Dtype,
    Json,
    Model,
    ModelKwargs,
    Policy,
    Ratio,
    Store,
    console_for,
    default_of,
    option,
    require_writable,
    settings_of,
    write_json,
)

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine


def verify_model(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Name of an embedded model, Hugging Face id, folder or GGUF file.", show_default=default_of("model")
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    policy: Policy = None,
    ratio: Ratio = None,
    json: Json = None,
) -> None:
    """Check with the model's real weights that reuse is exact where it must be, as where all tokens are recomputed.

    Exit status 1 if a check fails: then the model's prompts are answered by full prefill.
    """
    settings = settings_of(
        model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, policy=policy, ratio=ratio
    )
    console = console_for(json)
    with loaded_engine(settings, console) as engine, console.status("verifying") as status:
        verdict = engine.runtime.verify(lambda check: status.update(f"verifying: {check}"))
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
    docs: Documents,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Store = None,
    questions: Annotated[
        int,
        typer.Option(
            min=12,
            help="Number of questions to make from the documents; twice as many more are asked where these do not "
            "decide.",
        ),
    ] = 20,
    plot: Annotated[Path | None, option("--plot", "Draw KL against speed into this PNG.", "none is drawn")] = None,
    json: Json = None,
) -> None:
    """Measure on your documents how close answers stay to full prefill's, and choose the policy and ratio to use.

    Exit status 1 if no choice is safe: then prompts are answered by full prefill.
    """
    from ragfuse.calibration.runner import tune_malloc

    settings = settings_of(model=model, dtype=dtype, device=device, model_kwargs=model_kwargs, store=store)
    console = console_for(json)
    require_writable(plot)
    find_files(docs)
    tune_malloc(console)
    with console.status("starting"):
        from ragfuse.calibration.calibrate import draw_calibration, show_calibration
        from ragfuse.calibration.plots import require_plotting
    if plot is not None:
        require_plotting()
    with loaded_engine(settings, console) as engine:
        split = split_documents(docs, settings, engine.model.tokenizer, console)
        texts = list(split.documents.items())
        result = calibrate_engine(engine, texts, questions, console, settings.model)
    show_calibration(result, console)
    if plot is not None:
        draw_calibration(result, plot)
        console.print(f"Written: {plot}", highlight=False)
    write_json(result, json)
    raise typer.Exit(0 if result["safe"] else 1)


def calibrate_engine(
    engine: Engine, texts: Sequence[tuple[str, Sequence[str]]], questions: int, console: Console, name: str
) -> dict[str, Any]:
    """Verify and calibrate an engine's model, and have its store keep the choice; return the calibration's report.

    Args:
        engine: The engine.
        texts: (name, chunks) of each document.
        questions: Number of questions to make first.
        console: Where progress is shown.
        name: Name of the model, for messages.
    """
    from ragfuse.calibration.calibrate import MORE_QUESTIONS, calibrate, make_cases

    cases, more_cases = make_cases(texts, questions), make_cases(texts, MORE_QUESTIONS * questions, seed=1)
    with console.status("verifying") as status:
        verified = engine.runtime.verify(lambda check: status.update(f"verifying: {check}")).passed
    result = calibrate(engine.model, cases, console, name, verified, more_cases)
    chosen = (result["policy"], result["ratio"]) if result["safe"] else ("", None)
    engine.runtime.learn(engine.runtime.profile.calibrated(result["safe"], *chosen))
    if engine.catalog.file is None:
        console.print("[yellow]Not saved[/]: there is no disk tier to save it in (disk_bytes is 0).")
    return result
