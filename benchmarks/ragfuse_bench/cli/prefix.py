"""`ragfuse bench prefix`: what recurs at the beginning of prompts."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from ragfuse_bench.cli.speed import Threads

from ragfuse.cli.options import Dtype, Json, Model, console_for, prepared, settings_of, write_json


def prefix(
    model: Model = None,
    dtype: Dtype = None,
    system_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the system prompt.")] = 2048,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answers that are compared.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds, after one to warm up.")] = 5,
    threads: Threads = 1,
    json: Json = None,
) -> None:
    """Prefix caching: an identical prompt, and a shared system prompt, against full prefill and transformers' own."""
    from ragfuse_bench.prefix import PrefixOptions, run_prefix

    from ragfuse.calibration.runner import tune_malloc
    from ragfuse.models.dtypes import settled

    console = console_for(json)
    settings = settled(settings_of(model=model, dtype=dtype))
    told: dict[str, Any] = {"system_tokens": system_tokens, "answer_tokens": answer_tokens, "rounds": rounds}
    options = PrefixOptions(settings.model, settings.dtype, threads=threads, home=settings.home, **told)
    tune_malloc(console)
    prepared(settings)
    write_json(run_prefix(options, console), json)
