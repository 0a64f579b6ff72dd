"""What the options of several benchmarks have in common: their types, and how their text is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ragfuse.errors import SettingsError


@dataclass(frozen=True)
class FromText:
    """How the text of a command line option becomes the value of its field.

    parse: Called with the text and the option's name; raises SettingsError. default: The text that stands for the
    field's default; None: the default's parts, joined by commas.
    """

    parse: Callable[[str, str], Any]
    default: str | None = None


def integers(text: str, option: str) -> tuple[int, ...]:
    """Return the whole numbers in a list with commas; SettingsError where one is none."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"{option} is '{text}'; wanted a whole number, or several as in 2,4,6.") from error


def floats(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers in a list with commas; SettingsError where one is none."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"{option} is '{text}'; wanted a number, or several as in 0.05,0.15.") from error


def shares_of(text: str, option: str) -> tuple[float, ...]:
    """Return the numbers in a list with commas; SettingsError where one is not from 0 to 1."""
    shares = floats(text, option)
    if not all(0 <= share <= 1 for share in shares):
        raise SettingsError(f"{option} is '{text}'; wanted shares from 0 to 1.")
    return shares


def names(text: str, option: str) -> tuple[str, ...]:
    """Return the names in a list with commas."""
    return tuple(text.split(","))


SHAPE = "q05, l1b or l8b: 0.4B, 1.1B or 8B random weights; or a model as for `ragfuse ask --model`."
Shape = Annotated[str, typer.Option(help=SHAPE)]
BenchDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
BenchDevice = Annotated[str, typer.Option(help="cpu or cuda.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")]
PackedTokens = Annotated[
    int, typer.Option(min=0, help="Pack passages into chunks of at most this many tokens; 0: do not.")
]
Share = Annotated[float, typer.Option(help="Share of reused context tokens to recompute.")]
PolicyName = Annotated[str, typer.Option(help="Selection policy.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds; each measures every method once.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of what is drawn at random.")]
TierSpeeds = Annotated[
    tuple[float, ...], typer.Option(help="Speeds of the slow tier, megabytes a second."), FromText(floats)
]


def plot_option(what: str) -> Any:
    """Return the option of a picture.

    Args:
        what: What is drawn.
    """
    return typer.Option(help=f"Draw {what} to this file (PNG).")
