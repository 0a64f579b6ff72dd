"""Half the budget for the first tokens of every chunk, half for the highest deviations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Compare, Wanted, best, schedule
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True)
class Hybrid:
    """High deviations are enriched at chunk edges; this takes the edges for granted and spends the rest on HKVD."""

    name: str = "hybrid"
    check_layer: int = 1
    compare: Compare = "kv"
    wants: Wanted = "nothing"
    edge_share: float = 0.5

    @property
    def cost(self) -> PolicyCost:
        """All rows of the check layer first."""
        return PolicyCost("all rows of a layer", gradual=True)

    def thins(self, view: Candidates, layer: int, alive: int) -> bool:
        """Where the gradual schedule goes below what is alive."""
        return view.budget(self._share(view, layer)) < alive

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """Edges first, then deviations, thinned out gradually."""
        if deviation is None or len(alive) == 0:
            return alive
        share = self._share(view, layer)
        edges = view.offset.argsort(stable=True)[: view.budget(self.edge_share * share)]
        score = deviation.clone()
        kept = view.offset.new_zeros(len(view), dtype=deviation.dtype)
        kept[edges] = deviation.max() + 1 if len(deviation) else 0
        return best(alive, score + kept[alive], view.budget(share))

    def _share(self, view: Candidates, layer: int) -> float:
        return schedule(view.ratio, layer, self.check_layer, view.n_layers, gradual=True)
