"""`ragfuse bench codec`: what the codec's levels are worth."""

from __future__ import annotations

from typing import Annotated

import typer
from ragfuse_bench.cli.start import start
from ragfuse_bench.options import CodecOptions

from ragfuse.cli.options import Device, Dtype, Json, Model


def codec(
    options: CodecOptions,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    quick: Annotated[
        bool, typer.Option(help="Short trial run: one short context of each set and 12 questions.")
    ] = False,
    json: Json = None,
) -> None:
    """Measure size, fidelity, answers and speed of every level on real text, and what each idea of CacheGen saves."""
    from ragfuse_bench.codec.report import run_codec
    from ragfuse_bench.codec.wanted import Wanted

    report, settings = start("codec", json, options.plot, model=model, dtype=dtype, device=device)
    if quick:
        options = options.quick()
    given = (options.data, options.contexts, options.context_tokens, options.keep_kv)
    wanted = Wanted(settings, report, *given, quick)
    report.write(run_codec(wanted, options.questions, options.plot))
