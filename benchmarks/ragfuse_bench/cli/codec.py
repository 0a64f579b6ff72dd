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
    quick: Annotated[bool, typer.Option(help="One short context a set and 12 questions: to see it work.")] = False,
    json: Json = None,
) -> None:
    """Size, fidelity, answers and speed of every level on real text, and the share of each of CacheGen's ideas."""
    from ragfuse_bench.codec.report import run_codec
    from ragfuse_bench.figure import Wanted

    console, settings = start(json, options.plot, model=model, dtype=dtype, device=device)
    if quick:
        options = options.quick()
    sets = (str(options.data),) if options.data is not None else ()
    wanted = Wanted(settings, sets, options.contexts, 0, None, console, quick, options.context_tokens, options.keep_kv)
    write_json(run_codec(wanted, options.questions, options.plot), json)


def stream(options: StreamOptions, json: Json = None) -> None:
    """Questions with a deadline over a changing line: text, 8 bits, one level, levels as the deadline allows."""
    from ragfuse_bench.stream.run import run_stream

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    tune_malloc(console)
    write_json(run_stream(options, console), json)
