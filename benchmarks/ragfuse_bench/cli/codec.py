"""`ragfuse bench codec` and `stream`: what the levels that KV is kept in are worth, and on a changing line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from ragfuse_bench.cli.speed import (
    CONTEXT_TOKENS,
    QUICK_TOKENS,
    BenchDevice,
    BenchDtype,
    Shape,
    Threads,
    begun,
    numbers,
)

from ragfuse.cli.options import Device, Dtype, Json, Model, console_for, write_json
from ragfuse.errors import InputError


def codec(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with musique, SQuAD and LongChat; without, texts that come along.")
    ] = None,
    contexts: Annotated[int, typer.Option(min=1, help="Contexts of each set.")] = 4,
    context_tokens: Annotated[int, typer.Option(min=100, help="Tokens of a context.")] = CONTEXT_TOKENS,
    questions: Annotated[int, typer.Option(min=1, help="Questions that F1 is taken on.")] = 300,
    quick: Annotated[bool, typer.Option(help="One short context a set and 12 questions: to see it work.")] = False,
    keep_kv: Annotated[Path | None, typer.Option(help="A folder for raw KV, which the next run takes from it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw size against quality here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Size, fidelity, answers and speed of every level on real text, and the share of each of CacheGen's ideas."""
    from ragfuse_bench.codec.report import run_codec
    from ragfuse_bench.figure import Wanted

    if data is not None and not data.is_dir():
        raise InputError(f"--data is '{data}'; wanted a folder of data sets.")
    console, settings = begun(json, plot, model=model, dtype=dtype, device=device)
    tokens, most, asked = context_tokens, contexts, questions
    if quick:
        tokens, most, asked = min(tokens, QUICK_TOKENS), 1, min(asked, 12)
    sets = (str(data),) if data is not None else ()
    wanted = Wanted(settings, sets, most, 0, None, console, quick, tokens, keep_kv)
    write_json(run_codec(wanted, asked, plot), json)


def stream(
    model: Shape = "smollm2-135m-reader",
    dtype: BenchDtype = "float32",
    device: BenchDevice = "cpu",
    tokens: Annotated[int, typer.Option(help="Tokens of a context, about.")] = 6000,
    piece_tokens: Annotated[int, typer.Option(help="Tokens of a piece, about.")] = 1000,
    contexts: Annotated[int, typer.Option(help="Contexts that take turns.")] = 2,
    questions: Annotated[int, typer.Option(help="Questions on each, to judge what came.")] = 15,
    traces: Annotated[int, typer.Option(help="Bandwidth traces: half drawn, half measured ones.")] = 20,
    deadlines: Annotated[str, typer.Option(help="Seconds of the paper's, scaled to this machine.")] = "1,2",
    fixed: Annotated[str, typer.Option(help="The fixed level; default: the medium one.")] = "",
    adapt: Annotated[
        str, typer.Option(help="refine (something of all first), paper (section 5.3) or algorithm (its algorithm 1).")
    ] = "refine",
    bandwidths: Annotated[str, typer.Option(help="Gbit/s of the paper's, for the curve.")] = "0.1,0.3,1,3,10,30,100",
    threads: Threads = 1,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets: SQuAD, published bandwidths.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve here (PNG), a timeline beside it.")] = None,
    json: Json = None,
) -> None:
    """Questions with a deadline over a changing line: text, 8 bits, one level, levels as the deadline allows."""
    from ragfuse_bench.stream.run import StreamOptions, run_stream

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    counted: dict[str, Any] = {"tokens": tokens, "piece_tokens": piece_tokens, "contexts": contexts}
    counted |= {"questions": questions, "traces": traces, "threads": threads}
    named: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "fixed": fixed, "adapt": adapt}
    chosen = StreamOptions(
        **counted,
        **named,
        deadlines=numbers(deadlines, "--deadlines"),
        curve=numbers(bandwidths, "--bandwidths"),
        data=data,
        plot=plot,
    )
    tune_malloc(console)
    write_json(run_stream(chosen, console), json)
