"""`ragfuse bench matching`: what of known passages is found again in prompts that hold them altered."""

from __future__ import annotations

from typing import Annotated

import typer
from ragfuse_bench.cli.speed import Shape, Threads

from ragfuse.cli.options import Json, console_for, write_json
from ragfuse.errors import SettingsError


def matching(
    model: Shape = "smollm2-135m-reader",
    passages: Annotated[int, typer.Option(help="Known passages that stand in the prompts.")] = 200,
    prompts: Annotated[int, typer.Option(help="Prompts of each form.")] = 8,
    known: Annotated[str, typer.Option(help="Known spans among which time is taken.")] = "1000,10000,100000",
    rounds: Annotated[int, typer.Option(help="Times that prompts are looked through.")] = 30,
    threads: Threads = 1,
    json: Json = None,
) -> None:
    """What is recovered of passages that are numbered, escaped, cut, edited or split again, and the time it takes."""
    from ragfuse_bench.matching import MatchingOptions, run_matching

    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    try:
        counts = tuple(int(part) for part in known.split(","))
    except ValueError as error:
        raise SettingsError(f"--known is '{known}'; wanted whole numbers, as in 1000,10000.") from error
    options = MatchingOptions(model, passages, prompts=prompts, known=counts, rounds=rounds, threads=threads)
    tune_malloc(console)
    write_json(run_matching(options, console), json)
