"""Rows that the question attends to over the reused KV, in the third quarter of the model's
layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, Wanted, best
from ragfuse.types.policy_cost import PolicyCost, schedule


@dataclass(frozen=True, kw_only=True)
class Query(Policy):
    """Recomputes the rows with the highest attention: the same in all layers, or fewer layer by
    layer (`gradual`).
    """

    name: str
    gradual: bool
    wants: Wanted = "attention"

    @property
    def cost(self) -> PolicyCost:
        """A pass that finds the question's attention first, then rows by the ratio."""
        return PolicyCost("attention", self.gradual)

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the rows with the highest scores, as many as the layer's share allows."""
        share = schedule(
            candidates.ratio, layer, self.check_layer, candidates.n_layers, self.gradual
        )
        count = candidates.budget(share)
        if candidates.score is None or count >= len(active):
            return active
        return best(active, candidates.score.index_select(0, active), count)
