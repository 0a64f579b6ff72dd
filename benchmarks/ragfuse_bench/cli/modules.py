"""`ragfuse bench modules`: what prompts over modules are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from ragfuse_bench.cli.speed import Rounds, Threads, begun

from ragfuse.cli.options import Device, Dtype, Json, Model, prepared, write_json


def modules(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Questions over documents: held-out or demo, which come along, a file as for `bench quality`, or a "
            "folder of such files. Repeat for more."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Questions of each set, drawn from a seed; 0: all.")] = 12,
    context_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a question's documents.")] = 2600,
    rounds: Rounds = 3,
    threads: Threads = 1,
    quick: Annotated[bool, typer.Option(help="Two questions, two lengths, one round: to see it work.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw times and lengths here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Prompts over modules, computed and cached: time to the first token, answers, growth, memory of a batch."""
    from ragfuse_bench.modules.run import ModuleOptions, run_modules

    console, settings = begun(json, plot, model=model, dtype=dtype, device=device)
    prepared(settings)
    sizes: dict[str, Any] = {"limit": limit, "context_tokens": context_tokens, "rounds": rounds, "threads": threads}
    options = ModuleOptions(sets=tuple(data or ("held-out",)), **sizes, plot=plot)
    write_json(run_modules(settings, options.quick() if quick else options, console), json)
