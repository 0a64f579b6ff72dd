"""High KV deviation (HKVD): the rows whose KV changes most when they attend to the other chunks
(CacheBlend 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, best
from ragfuse.types.policy_cost import PolicyCost, schedule


@dataclass(frozen=True, kw_only=True)
class Hkvd(Policy):
    """Recomputes the rows with the highest KV deviation at the check layer.

    Args:
        gradual: True: rows are ranked again and fewer are kept in each later layer; False: the same
            rows in all layers.
    """

    check_layer: int = 1
    gradual: bool = True

    @property
    def cost(self) -> PolicyCost:
        """K and V of all rows of the check layer first, then rows by the ratio."""
        return PolicyCost("all rows of a layer", self.gradual)

    def thins(self, candidates: Candidates, layer: int, active: int) -> bool:
        """Whether the gradual schedule allows fewer rows in `layer` than were computed before."""
        return self.gradual and self._budget(candidates, layer) < active

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the rows with the highest deviations, as many as the layer's share allows."""
        if deviation is None or (layer > self.check_layer and not self.gradual):
            return active
        return best(active, deviation, self._budget(candidates, layer))

    def _budget(self, candidates: Candidates, layer: int, part: float = 1.0) -> int:
        share = schedule(
            candidates.ratio, layer, self.check_layer, candidates.n_layers, self.gradual
        )
        return candidates.budget(part * share)
