"""`ragfuse bench quality`: answers beside full prefill's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.cli.report import begin
from ragfuse_bench.options import QualityOptions

from ragfuse.cli.options import Device, Dtype, Json, Model
from ragfuse.errors import InputError


def quality(
    options: QualityOptions,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    quick: Annotated[
        bool,
        typer.Option(help="Short run: 64 held-out questions with the methods full, none and auto."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw KL against speed to this file (PNG).")
    ] = None,
    json: Json = None,
) -> None:
    """Compare answers and next-token distributions of methods with those of full prefill, on the
    same prompts.
    """
    from ragfuse_bench.plots import plot_frontier
    from ragfuse_bench.quality.report import run_quality

    from ragfuse.calibration.runner import tune_malloc

    if quick:
        options = options.quick()
    if not options.sets:
        raise InputError(
            "Name a data set: --data held-out, --data demo or --data FILE; or say --quick."
        )
    report, settings = begin("quality", json, model=model, dtype=dtype, device=device)
    if plot is not None:
        import matplotlib  # noqa: F401 - if it is missing, that is told at once
    tune_malloc(report)
    rows = _rows_beside(json)
    result = run_quality(settings, options, report, rows)
    report.write(result)
    if plot is not None:
        plot_frontier(result, plot)


def _rows_beside(result: Path | None) -> Path | None:
    """Where measurements are kept as they come: beside the result, if that is a file."""
    return result.with_suffix(".rows.jsonl") if result is not None and str(result) != "-" else None
