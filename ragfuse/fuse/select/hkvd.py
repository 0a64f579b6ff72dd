"""High KV deviation (HKVD): the rows whose KV changes most when they attend to the other chunks
(CacheBlend 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, best


@dataclass(frozen=True, kw_only=True)
class Hkvd(Policy):
    """Recomputes the rows with the highest KV deviation at the check layer, ranked again where it
    is `gradual`.
    """

    check_layer: int = 1
    gradual: bool = True

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the rows with the highest deviations, as many as the layer's share allows."""
        if deviation is None:
            return active
        return best(active, deviation, self.budget(candidates, layer))
