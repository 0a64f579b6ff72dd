"""What the options of several benchmarks have in common: their types, and how their text is
read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ragfuse.errors import SettingsError


@dataclass(frozen=True)
class FromText:
    """How the text of a command line option becomes the value of its field.

    parse: Called with the text and the option's name; raises SettingsError.
    """

    parse: Callable[[str, str], Any]


def integers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers from 1 on in a list with commas; SettingsError where one is none."""
    return _numbers(int, text, option, lambda number: number >= 1, "whole numbers from 1 on")


def floats(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers above 0 in a list with commas; SettingsError where one is none."""
    return _numbers(float, text, option, lambda number: number > 0, "numbers above 0")


def shares_of(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers from 0 to 1 in a list with commas; SettingsError where one is none."""
    return _numbers(float, text, option, lambda number: 0 <= number <= 1, "shares from 0 to 1")


def _numbers(
    kind: Callable[[str], Any], text: str, option: str, fits: Callable[[Any], bool], wanted: str
) -> tuple[Any, ...]:
    found: tuple[Any, ...] = ()
    with suppress(ValueError):
        found = tuple(kind(part) for part in text.split(","))
    if not found or not all(map(fits, found)):
        raise SettingsError(f"{option} is '{text}'; wanted {wanted}, with commas.")
    return found


def names(text: str, option: str) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(text.split(","))


SHAPE = "q05, l1b or l8b: 0.4B, 1.1B or 8B random weights; or a model as for `ragfuse ask --model`."
Shape = Annotated[str, typer.Option(help=SHAPE)]
BenchDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
BenchDevice = Annotated[str, typer.Option(help="cpu or cuda.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")]
PackedTokens = Annotated[
    int,
    typer.Option(
        min=0,
        help="Pack passages into chunks of at most this many tokens; 0: keep them as they are.",
    ),
]
Share = Annotated[
    float, typer.Option(min=0.01, max=1.0, help="Share of reused context tokens to recompute.")
]
PolicyName = Annotated[str, typer.Option(help="Selection policy.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Number of rounds; each measures every method once.")
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
TierSpeeds = Annotated[
    tuple[float, ...],
    typer.Option(help="Speeds of the slow tier, megabytes a second."),
    FromText(floats),
]
