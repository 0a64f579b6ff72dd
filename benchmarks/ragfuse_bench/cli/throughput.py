"""`ragfuse bench throughput`: how many requests a server answers, and whether it stays that way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.cli.report import Report
from ragfuse_bench.options import ThroughputOptions

from ragfuse.cli.options import Device, Dtype, Json, Model, prepare_model, settings_of

KNOWN = ("musique", "2wikimqa")
"""Data sets that are taken of a folder: the paper's."""


def throughput(
    options: ThroughputOptions,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    storage: Annotated[int | None, typer.Option(min=1, help="Megabytes of the memory tier.")] = None,
    quick: Annotated[
        bool, typer.Option(help="Short run of about 5 minutes: two rates for each method, no --minutes.")
    ] = False,
    json: Json = None,
) -> None:
    """Load a server with random requests: full recompute, prefix caching and ragfuse; then batched decoding."""
    from ragfuse_bench.throughput.run import run_throughput
    from ragfuse_bench.throughput.served import require_server

    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc
    from ragfuse.models.dtypes import resolve_auto

    report = Report("throughput", json)
    memory_bytes = storage and storage << 20
    settings = resolve_auto(settings_of(model=model, dtype=dtype, device=device, memory_bytes=memory_bytes))
    require_server(settings)
    if options.plot is not None:
        require_plotting()
    options = replace(options.quick() if quick else options, sets=sets_of(options.sets))
    tune_malloc(report)
    prepare_model(settings)
    report.write(run_throughput(settings, options, report))


def sets_of(data: tuple[str, ...]) -> tuple[str, ...]:
    """Return data sets by name, where a folder stands for the files of the paper's sets in it, wherever they lie."""
    found: list[str] = []
    for name in data:
        files = sorted(Path(name).rglob("*.json*")) if Path(name).is_dir() else []
        known = [str(file) for file in files if file.name.startswith(KNOWN)]
        found += known or [name]
    return tuple(found)
