"""`ragfuse bench modules`: what prompts over modules are worth."""

from __future__ import annotations

from typing import Annotated

import typer
from ragfuse_bench.cli.start import start
from ragfuse_bench.modules.options import ModuleOptions

from ragfuse.cli.options import Device, Dtype, Json, Model, prepare_model


def modules(
    options: ModuleOptions,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    quick: Annotated[bool, typer.Option(help="Short trial run: two questions, two lengths, one round.")] = False,
    json: Json = None,
) -> None:
    """Compare prompts with cached and with computed modules: time to the first token by length, answers, memory."""
    from ragfuse_bench.modules.run import run_modules

    report, settings = start("modules", json, options.plot, model=model, dtype=dtype, device=device)
    prepare_model(settings)
    report.write(run_modules(settings, options.quick() if quick else options, report))
