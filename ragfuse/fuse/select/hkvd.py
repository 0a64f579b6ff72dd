"""High KV deviation: rows whose KV changes most once they see the other chunks (CacheBlend 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Compare, Wanted, best, schedule
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True)
class Hkvd:
    """Highest deviation at layer 1, kept to the end (flat) or re-ranked and thinned out layer by layer (gradual)."""

    name: str
    gradual: bool
    check_layer: int = 1
    compare: Compare = "kv"
    wants: Wanted = "nothing"

    @property
    def cost(self) -> PolicyCost:
        """All rows of the check layer first."""
        return PolicyCost("all rows of a layer", self.gradual)

    def thins(self, view: Candidates, layer: int, alive: int) -> bool:
        """Where the gradual schedule goes below what is alive."""
        return self.gradual and self._budget(view, layer) < alive

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """The highest deviations that the layer's share allows."""
        if deviation is None or (layer > self.check_layer and not self.gradual):
            return alive
        return best(alive, deviation, self._budget(view, layer))

    def _budget(self, view: Candidates, layer: int) -> int:
        return view.budget(schedule(view.ratio, layer, self.check_layer, view.n_layers, self.gradual))
