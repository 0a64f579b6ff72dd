"""How long conversations are, and how long people pause: counted from real ones, kept as figures,
drawn from again.

What comes along holds counts and quantiles alone, no text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAPER_SINGLE, PAPER_TURNS = 0.27, 5.75
"""Of ShareGPT: the share of conversations with one turn (section 2.3), turns on average (section
4.2).
"""


@dataclass(frozen=True)
class Lengths:
    """Counts and quantiles of real conversations, and where they are from.

    turns: (turns, how many conversations). questions, answers: quantiles of tokens; pauses: of
    seconds between requests of one conversation; from the least to the most, evenly spaced. alike:
    of questions and of answers, the share of the variance of log tokens that lies between
    conversations.
    """

    source: str
    turns: tuple[tuple[int, int], ...]
    questions: tuple[float, ...]
    answers: tuple[float, ...]
    alike: tuple[float, float]
    pauses: tuple[float, ...]

    def turn_shares(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(turns, how likely), weighed so that the paper's share has one turn and the mean is the
        paper's.

        Conversations of several turns are tilted by exp(t * turns): of all ways to have this mean,
        the closest to what was counted.
        """
        several = np.array([n for n, _ in self.turns if n > 1])
        counted = np.array([many for n, many in self.turns if n > 1], dtype=float)
        wanted = (PAPER_TURNS - PAPER_SINGLE) / (1 - PAPER_SINGLE)
        low, high = -1.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            weights = counted * np.exp(middle * several)
            low, high = (
                (middle, high)
                if (weights * several).sum() < wanted * weights.sum()
                else (low, middle)
            )
        weights = counted * np.exp(low * several)
        shares = np.concatenate([[PAPER_SINGLE], (1 - PAPER_SINGLE) * weights / weights.sum()])
        return np.concatenate([[1], several]), shares


def packaged() -> Lengths:
    """What comes along."""
    path = Path(str(files("ragfuse_bench"))) / "sets" / "conversation_lengths.json"
    found = json.loads(path.read_text("utf-8"))
    lists = {name: tuple(found[name]) for name in ("questions", "answers", "alike", "pauses")}
    return Lengths(
        source=found["source"], turns=tuple((n, many) for n, many in found["turns"]), **lists
    )
