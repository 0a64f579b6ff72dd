"""What `bench engines` measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.option_types import FromText, Seed, Threads

from ragfuse.errors import SettingsError


def sizes(text: str, option: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of numbers from a text such as 6x512,24x160; SettingsError where it is none."""
    try:
        pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
        found = tuple((n, tokens) for n, tokens in pairs)
    except ValueError as error:
        raise SettingsError(f"{option} is {text!r:.60}; wanted chunks x tokens, such as 6x512,24x160.") from error
    if any(n < 1 or tokens < 16 for n, tokens in found):
        raise SettingsError(f"{option} is {text!r:.60}; wanted at least 1 chunk of at least 16 tokens.")
    return found


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers in a list with commas, each from 1 on; SettingsError where one is none."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"{option} is {text!r:.60}; wanted whole numbers with commas.") from error
    if min(found) < 1:
        raise SettingsError(f"{option} is {text!r:.60}; wanted whole numbers from 1 on.")
    return found


@dataclass(frozen=True)
class EnginesOptions:
    """What `bench engines` measures."""

    vllm: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with vLLM and vllm-ragfuse, such as .venv-vllm/bin/python."),
    ] = None
    shapes: Annotated[
        tuple[tuple[int, int], ...],
        typer.Option(help="Prompts, as chunks x tokens of a chunk."),
        FromText(sizes, "6x512,24x160"),
    ] = ((6, 512), (24, 160))
    together: Annotated[
        tuple[int, ...], typer.Option(help="Requests at the same time."), FromText(numbers, "1,4,16")
    ] = (1, 4, 16)
    each: Annotated[int, typer.Option(min=1, help="Requests of each client in a round.")] = 2
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each asks every server once.")] = 3
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 64
    memory_gib: Annotated[int, typer.Option(min=1, help="GiB of KV that vLLM keeps in memory.")] = 4
    threads: Threads = 1
    seed: Seed = 0
