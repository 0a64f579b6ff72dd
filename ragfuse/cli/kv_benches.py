"""`ragfuse bench codec`: what the levels that KV is kept in are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragfuse.cli.benches import CONTEXT_TOKENS, QUICK_TOKENS
from ragfuse.cli.options import Device, Dtype, Json, Model, console_for, settings_of, write_json
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
    from ragfuse.bench.codec.report import run_codec
    from ragfuse.bench.figure import Wanted
    from ragfuse.bench.plots import require_plotting
    from ragfuse.bench.runner import tune_malloc
    from ragfuse.dtypes import settled

    console = console_for(json)
    settings = settled(settings_of(model=model, dtype=dtype, device=device))
    if plot is not None:
        require_plotting()
    if data is not None and not data.is_dir():
        raise InputError(f"--data is '{data}'; wanted a folder of data sets.")
    tune_malloc(console)
    tokens, most, asked = context_tokens, contexts, questions
    if quick:
        tokens, most, asked = min(tokens, QUICK_TOKENS), 1, min(asked, 12)
    sets = (str(data),) if data is not None else ()
    wanted = Wanted(settings, sets, most, 0, None, console, quick, tokens, keep_kv)
    write_json(run_codec(wanted, asked, plot), json)
