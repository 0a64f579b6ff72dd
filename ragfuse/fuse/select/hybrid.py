"""Half the budget for the first tokens of every chunk, half for the highest deviations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.hkvd import Hkvd
from ragfuse.fuse.select.policy import Candidates, best


@dataclass(frozen=True, kw_only=True)
class Hybrid(Hkvd):
    """Recomputes the first tokens of every chunk, where high deviations are frequent, and spends
    the rest on HKVD.

    Args:
        edge_share: Share of the budget that goes to the first tokens of the chunks.
    """

    name: str = "hybrid"
    edge_share: float = 0.5

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the first tokens of the chunks, then the highest deviations, fewer in each
        layer.
        """
        if deviation is None or len(active) == 0:
            return active
        edges = candidates.offset.argsort(stable=True)[
            : self.budget(candidates, layer, self.edge_share)
        ]
        bonus = deviation.new_zeros(len(candidates))
        bonus[edges] = deviation.max() + 1
        return best(active, deviation + bonus[active], self.budget(candidates, layer))
