"""What people ask of a server, as values: conversations of turns, with lengths and times. Nothing
is served here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from ragfuse_bench.sessions.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer in tokens, and when it comes.

    pause_s: after the answer before it is there (the first: after the beginning).
    """

    question: int
    answer: int
    pause_s: float


Talk = tuple[Turn, ...]


def drawn(lengths: Lengths, talks: int, per_s: float, seed: int) -> list[Talk]:
    """So many conversations, which begin as a Poisson process of so many a second: the same for the
    same seed.
    """
    rng = np.random.default_rng(seed)
    turns, shares = lengths.turn_shares()
    counts = rng.choice(turns, size=talks, p=shares)
    starts = np.cumsum(rng.exponential(1 / per_s, talks))
    asked = _tokens(rng, lengths.questions, lengths.alike[0], counts)
    answered = _tokens(rng, lengths.answers, lengths.alike[1], counts)
    pauses = _from(lengths.pauses, rng.random(int(counts.sum())))
    found, at = [], 0
    for start, count in zip(starts, counts, strict=True):
        mine = slice(at, at := at + int(count))
        waits = [float(start), *pauses[mine][1:].tolist()]
        rows = zip(asked[mine].tolist(), answered[mine].tolist(), waits, strict=True)
        found.append(
            tuple(Turn(max(1, round(q)), max(1, round(a)), pause_s) for q, a, pause_s in rows)
        )
    return found


def described(talks: Sequence[Talk]) -> dict[str, float]:
    """Conversations, turns on average, tokens on average, and the shares with more than 2,048 and
    4,096 tokens.
    """
    tokens = np.array([sum(turn.question + turn.answer for turn in talk) for talk in talks])
    return {
        "sessions": len(talks),
        "turns": float(np.mean([len(talk) for talk in talks])),
        "tokens": float(tokens.mean()),
        "over_2k": float((tokens > 2048).mean()),
        "over_4k": float((tokens > 4096).mean()),
    }


def _tokens(
    rng: np.random.Generator, quantiles: Sequence[float], alike: float, counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """A length for each turn, those of one conversation alike: a normal copula over the
    quantiles.
    """
    own = np.repeat(rng.standard_normal(len(counts)), counts)
    each = rng.standard_normal(int(counts.sum()))
    mixed = np.sqrt(alike) * own + np.sqrt(1 - alike) * each
    return _from(quantiles, np.vectorize(NormalDist().cdf)(mixed))


def _from(quantiles: Sequence[float], at: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.interp(at, np.linspace(0, 1, len(quantiles)), quantiles)


def arrivals(talks: Sequence[Talk]) -> Iterator[tuple[float, int]]:
    """(second, conversation) of each first turn: what comes whatever is answered."""
    for number, talk in enumerate(talks):
        yield talk[0].pause_s, number
