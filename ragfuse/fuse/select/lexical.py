"""Rows near words of the question, found from the token ids alone, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, Wanted


@dataclass(frozen=True, kw_only=True)
class Lexical(Policy):
    """Recomputes rows nearest to rare words that the question shares with the chunks, then the
    first of each chunk.
    """

    name: str = "lexical"
    wants: Wanted = "words"

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the rows with the highest scores, as many as the ratio allows."""
        if layer > 0 or candidates.score is None:
            return active
        score = candidates.score.where(
            candidates.score > 0, -candidates.offset.to(candidates.score)
        )
        first = score.argsort(descending=True, stable=True)[: self.budget(candidates, layer)]
        return active[first.sort().values]
