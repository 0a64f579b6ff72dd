"""High KV deviation (HKVD): the rows whose KV changes most when they attend to the other chunks (CacheBlend 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Compare, Wanted, best
from ragfuse.types.policy_cost import PolicyCost, schedule


@dataclass(frozen=True)
class Hkvd:
    """Recomputes the rows with the highest KV deviation at the check layer.

    Args:
        name: Of the policy.
        gradual: True: rows are ranked again and fewer are kept in each later layer; False: the same rows in all layers.
        check_layer: The first layer whose rows are chosen.
        compare: Whether the deviation is measured on keys, values or both.
        wants: No score is needed.
    """

    name: str
    gradual: bool
    check_layer: int = 1
    compare: Compare = "kv"
    wants: Wanted = "nothing"

    @property
    def cost(self) -> PolicyCost:
        """K and V of all rows of the check layer first, then rows by the ratio."""
        return PolicyCost("all rows of a layer", self.gradual)

    def thins(self, candidates: Candidates, layer: int, active: int) -> bool:
        """Whether the gradual schedule allows fewer rows in `layer` than were computed before."""
        return self.gradual and self._budget(candidates, layer) < active

    def choose(self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None) -> Tensor:
        """Return the rows with the highest deviations, as many as the layer's share allows."""
        if deviation is None or (layer > self.check_layer and not self.gradual):
            return active
        return best(active, deviation, self._budget(candidates, layer))

    def _budget(self, candidates: Candidates, layer: int) -> int:
        return candidates.budget(schedule(candidates.ratio, layer, self.check_layer, candidates.n_layers, self.gradual))
