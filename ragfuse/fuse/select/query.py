"""Rows that the question looks at: attention of the last prompt token over the reused cache, summed over layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Static, Wanted, best, schedule
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Query(Static):
    """Highest attention, the same rows in all layers or thinned out layer by layer."""

    name: str
    gradual: bool
    wants: Wanted = "attention"

    @property
    def cost(self) -> PolicyCost:
        """The question's attention first."""
        return PolicyCost("attention", self.gradual)

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """The highest scores that the layer's share allows."""
        if view.score is None:
            return alive
        share = schedule(view.ratio, layer, self.check_layer, view.n_layers, self.gradual)
        return best(alive, view.score[alive], view.budget(share))
