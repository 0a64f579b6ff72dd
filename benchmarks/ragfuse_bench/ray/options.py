"""The options of `ragfuse bench ray`. Imports no torch, so its help is quick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from ragfuse_bench.option_types import FromText, Seed, names

from ragfuse.errors import SettingsError

PARTS = ("simulation", "bulk", "serving")


@dataclass(frozen=True)
class RayOptions:
    """What `bench ray` measures.

    Args:
        replicas: Replicas of the large simulation.
        corpus: Chunks of its corpus.
        questions: Questions over it.
        talks: Conversations of the trace where there is no folder of data.
        turns: First requests of the trace that are simulated.
        chunks: Chunks that are encoded in bulk.
        sent: Conversations of the trace whose requests are sent to real replicas.
        pause_s: Seconds between an answer and the next of these requests, in which replicas encode what they missed.
    """

    data: Annotated[
        Path | None, typer.Option(help="Folder of data sets with Mooncake's trace; else conversations are drawn.")
    ] = None
    parts: Annotated[
        tuple[str, ...], typer.Option(help="What to run: simulation (needs no Ray), bulk, serving."), FromText(names)
    ] = PARTS
    quick: Annotated[bool, typer.Option(help="Short trial run of everything.")] = False
    seed: Seed = 0
    plot: Annotated[Path | None, typer.Option(help="Draw the simulations to this file (PNG).")] = None
    replicas: int = 64
    corpus: int = 1_000_000
    questions: int = 40_000
    talks: int = 2000
    turns: int = 4000
    chunks: int = 192
    sent: int = 40
    pause_s: float = 3.0

    def __post_init__(self) -> None:
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise SettingsError(f"--parts is '{','.join(self.parts)}'; wanted some of {', '.join(PARTS)}.")
        if self.plot is not None and "simulation" not in self.parts:
            raise SettingsError("--plot draws the simulations: add simulation to --parts, or leave it out.")

    def shortened(self) -> RayOptions:
        """Return the options of a trial run where `quick` is set, else these."""
        less: dict[str, Any] = {
            "corpus": 20_000,
            "questions": 2000,
            "talks": 100,
            "chunks": 24,
            "sent": 6,
            "pause_s": 0.5,
        }
        return replace(self, **less) if self.quick else self
