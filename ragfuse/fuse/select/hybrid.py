"""Half the budget for the first tokens of every chunk, half for the highest deviations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Compare, Wanted, best
from ragfuse.types.policy_cost import PolicyCost, schedule


@dataclass(frozen=True)
class Hybrid:
    """Recomputes the first tokens of every chunk, where high deviations are frequent, and spends the rest on HKVD.

    Args:
        name: Of the policy.
        check_layer: The first layer whose rows are chosen.
        compare: Whether the deviation is measured on keys, values or both.
        wants: No score is needed.
        edge_share: Share of the budget that goes to the first tokens of the chunks.
    """

    name: str = "hybrid"
    check_layer: int = 1
    compare: Compare = "kv"
    wants: Wanted = "nothing"
    edge_share: float = 0.5

    @property
    def cost(self) -> PolicyCost:
        """K and V of all rows of the check layer first, then rows by the ratio."""
        return PolicyCost("all rows of a layer", gradual=True)

    def thins(self, candidates: Candidates, layer: int, active: int) -> bool:
        """Whether the gradual schedule allows fewer rows in `layer` than were computed before."""
        return candidates.budget(self._share(candidates, layer)) < active

    def choose(self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None) -> Tensor:
        """Return the first tokens of the chunks, then the highest deviations, fewer in each layer."""
        if deviation is None or len(active) == 0:
            return active
        share = self._share(candidates, layer)
        edges = candidates.offset.argsort(stable=True)[: candidates.budget(self.edge_share * share)]
        score = deviation.clone()
        bonus = candidates.offset.new_zeros(len(candidates), dtype=deviation.dtype)
        bonus[edges] = deviation.max() + 1 if len(deviation) else 0
        return best(active, score + bonus[active], candidates.budget(share))

    def _share(self, candidates: Candidates, layer: int) -> float:
        return schedule(candidates.ratio, layer, self.check_layer, candidates.n_layers, gradual=True)
