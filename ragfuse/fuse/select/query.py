"""Rows that the question attends to: attention of the last prompt token over the reused KV, summed over layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Static, Wanted, best, schedule
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Query(Static):
    """Recomputes the rows with the highest attention: the same in all layers, or fewer layer by layer (`gradual`)."""

    name: str
    gradual: bool
    wants: Wanted = "attention"

    @property
    def cost(self) -> PolicyCost:
        """A pass that finds the question's attention first, then rows by the ratio."""
        return PolicyCost("attention", self.gradual)

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """Return the rows with the highest scores, as many as the layer's share allows."""
        if view.score is None:
            return alive
        share = schedule(view.ratio, layer, self.check_layer, view.n_layers, self.gradual)
        return best(alive, view.score[alive], view.budget(share))
