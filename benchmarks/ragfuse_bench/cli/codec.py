"""`ragfuse bench codec` and `stream`: what the codec's levels are worth, on disk and on a changing line."""

from __future__ import annotations

from typing import Annotated

import typer
from ragfuse_bench.cli.start import start
from ragfuse_bench.options import CodecOptions, StreamOptions

from ragfuse.cli.options import Device, Dtype, Json, Model, console_for, write_json


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

    console, settings = start(json, options.plot, model=model, dtype=dtype, device=device)
    if quick:
        options = options.quick()
    given = (options.data, options.contexts, options.context_tokens, options.keep_kv)
    wanted = Wanted(settings, console, *given, quick)
    write_json(run_codec(wanted, options.questions, options.plot), json)


def stream(options: StreamOptions, json: Json = None) -> None:
    """Send contexts over a changing link before a deadline: as text, 8-bit KV, one level, adaptive levels."""
    from ragfuse_bench.stream.run import run_stream

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_stream(options, console), json)
