"""Rows near words of the question, found from the token ids alone, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, Wanted

TIE_STEP = 1e-12
"""What a row scores less than an equal one before it, so that the same rows are chosen always."""


@dataclass(frozen=True, kw_only=True)
class Lexical(Policy):
    """Recomputes rows nearest to rare words that the question shares with the chunks, then the
    first of each chunk.
    """

    name: str = "lexical"
    wants: Wanted = "words"

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return the nearness, and less than 0 by their offsets for rows that are near no word."""
        if candidates.score is None:
            return None
        near = candidates.score.double().where(candidates.score > 0, -candidates.offset)
        return near.sub(active, alpha=TIE_STEP)
