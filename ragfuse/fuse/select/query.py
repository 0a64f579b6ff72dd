"""Rows that the question attends to over the reused KV, in the third quarter of the model's
layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, Wanted, best


@dataclass(frozen=True, kw_only=True)
class Query(Policy):
    """Recomputes the rows with the highest attention: the same in all layers, or fewer layer by
    layer (`gradual`).
    """

    wants: Wanted = "attention"

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the rows with the highest scores, as many as the layer's share allows."""
        count = self.budget(candidates, layer)
        if candidates.score is None or count >= len(active):
            return active
        return best(active, candidates.score.index_select(0, active), count)
