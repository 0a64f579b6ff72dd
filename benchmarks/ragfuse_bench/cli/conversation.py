"""`ragfuse bench conversation`: what keeping the KV of a conversation's turns is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.cli.speed import BenchDevice, BenchDtype, Rounds, Shape, Threads

from ragfuse.cli.options import Json, console_for, write_json
from ragfuse.errors import InputError


def conversation(
    model: Shape = "smollm2-135m",
    dtype: BenchDtype = "float32",
    device: BenchDevice = "cpu",
    turns: Annotated[int, typer.Option(min=2, help="Turns of the conversation.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 384,
    opening_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the first message, about.")] = 1400,
    window: Annotated[int, typer.Option(min=8, help="Tokens of a text before it is shortened, for perplexity.")] = 2048,
    texts: Annotated[int, typer.Option(min=1, help="Such texts, at most.")] = 4,
    rounds: Rounds = 3,
    threads: Threads = 1,
    quick: Annotated[bool, typer.Option(help="Three short turns, one short text: to see it work.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of multi-turn dialogues; without, notes that come along.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw seconds by turn here (PNG).")] = None,
    json: Json = None,
) -> None:
    """Measure a growing conversation: turns with their history from the store, and recomputed; then truncation."""
    from ragfuse_bench.conversation import ConversationOptions, run_conversation

    from ragfuse.calibration.plots import require_plotting
    from ragfuse.calibration.runner import tune_malloc

    console = console_for(json)
    if data is not None and not data.is_dir():
        raise InputError(f"--data is '{data}'; wanted a folder of data sets.")
    if plot is not None:
        require_plotting()
    tune_malloc(console)
    if quick:
        turns, answer_tokens, opening_tokens, window, texts, rounds = 3, 16, 200, 256, 1, 1
    sizes = ConversationOptions(model, dtype, device, turns, answer_tokens, opening_tokens, window, texts)
    options = ConversationOptions(**{**vars(sizes), "rounds": rounds, "threads": threads, "data": data, "plot": plot})
    write_json(run_conversation(options, console), json)
