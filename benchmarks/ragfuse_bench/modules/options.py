"""The options of `ragfuse bench modules`. Imports no torch, so its help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from ragfuse_bench.option_types import Rounds, Threads, plot_option

USES = ("code", "cooking", "trip")
"""Code generation, personalisation, a trip with parameters: figures 6 to 8 of Prompt Cache, in our own words."""
LENGTHS = (512, 1024, 2048, 3072)
"""Tokens of prompts whose time `bench modules` fits by a line."""


@dataclass(frozen=True)
class Batch:
    """How many prompts share a module of so many tokens, and how many tokens each answer has.

    longer: Tokens of further modules: a model and its libraries take the same memory for all, so that sharing saves a
    larger part of the process's memory the longer the module is.
    """

    prompts: int = 8
    tokens: int = 1024
    answer_tokens: int = 32
    longer: tuple[int, ...] = (4096,)


@dataclass(frozen=True)
class ModuleOptions:
    """What `bench modules` measures.

    lengths: Tokens of the prompts whose time is fitted by a line. batch: None where a batch's memory is not measured,
    as on a GPU, where the process's memory does not tell it.
    """

    uses: tuple[str, ...] = USES
    sets: Annotated[
        tuple[str, ...],
        typer.Option(
            "--data",
            help="Questions over documents: held-out or demo (both included), a file as for `bench quality`, or a "
            "folder of such files. Repeat for more.",
        ),
    ] = ("held-out",)
    limit: Annotated[
        int, typer.Option(min=0, help="Questions of each set, drawn at random by a fixed seed; 0: all.")
    ] = 12
    context_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a question's documents.")] = 2600
    lengths: tuple[int, ...] = LENGTHS
    batch: Batch | None = field(default_factory=Batch)
    rounds: Rounds = 3
    threads: Threads = 1
    plot: Annotated[Path | None, plot_option("times and lengths")] = None

    def quick(self) -> ModuleOptions:
        """Return the options of `--quick`: two questions of each set, two lengths, one round, short answers."""
        batch = self.batch and Batch(answer_tokens=8, longer=())
        return replace(self, limit=2, rounds=1, lengths=(512, 2048), batch=batch)
