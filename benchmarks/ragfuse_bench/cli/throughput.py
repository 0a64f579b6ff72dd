"""`ragfuse bench throughput`: what a server can take, and whether it goes on taking it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from ragfuse_bench.cli.speed import Threads, numbers

from ragfuse.cli.options import Device, Dtype, Json, Model, console_for, prepared, settings_of, write_json

KNOWN = ("musique", "2wikimqa")
"""Data sets that are taken of a folder: the paper's."""


def throughput(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Questions: a set that comes along (held-out, demo), a file as for `bench quality`, or a folder with "
            "files of musique and 2wikimqa. Repeat for more."
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions, drawn from a seed; each comes in many words.")] = 12,
    chunk_tokens: Annotated[int, typer.Option(help="Pack passages into chunks of up to so many; 0: as they are.")] = 0,
    storage: Annotated[int | None, typer.Option(min=1, help="Megabytes of memory that keep KV.")] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 16,
    rates: Annotated[
        str, typer.Option(help="Shares of the requests a second that a method can do.")
    ] = "0.3,0.5,0.7,0.9",
    seconds: Annotated[float, typer.Option(help="Load at each rate, of each method.")] = 120.0,
    minutes: Annotated[float, typer.Option(help="Load that goes on, to see whether anything grows; 0: none.")] = 30.0,
    together: Annotated[int, typer.Option(min=1, help="Answers decoded together.")] = 8,
    together_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of these.")] = 64,
    threads: Threads = 1,
    seed: Annotated[int, typer.Option(help="Of what is drawn; the same gives the same.")] = 0,
    quick: Annotated[
        bool, typer.Option(help="Two rates of each method and nothing that goes on: 5 minutes of load.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw time against rate here (PNG).")] = None,
    json: Json = None,
) -> None:
    """A server under requests that come at random: full recompute, prefix caching and ragfuse; answers together."""
    from ragfuse_bench.throughput.run import QUICK, ThroughputOptions, run_throughput
    from ragfuse_bench.throughput.served import require_server

    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc
    from ragfuse.models.dtypes import settled

    console = console_for(json)
    settings = settled(settings_of(model=model, dtype=dtype, device=device, memory_bytes=storage and storage << 20))
    require_server(settings)
    if plot is not None:
        require_plotting()
    told: dict[str, Any] = {"shares": numbers(rates, "--rates"), "seconds": seconds, "minutes": minutes}
    told |= {"cases": questions, "chunk_tokens": chunk_tokens, "answer_tokens": answer_tokens, "threads": threads}
    told |= {"together": together, "together_tokens": together_tokens, "seed": seed, "plot": plot}
    options = ThroughputOptions(sets=sets_of(data or ["held-out"]), **{**told, **(QUICK if quick else {})})
    tune_malloc(console)
    prepared(settings)
    write_json(run_throughput(settings, options, console), json)


def sets_of(data: list[str]) -> tuple[str, ...]:
    """Data sets by name; a folder stands for the files of the paper's sets in it, wherever they lie."""
    found: list[str] = []
    for name in data:
        files = sorted(Path(name).rglob("*.json*")) if Path(name).is_dir() else []
        known = [str(file) for file in files if file.name.startswith(KNOWN)]
        found += known or [name]
    return tuple(found)
