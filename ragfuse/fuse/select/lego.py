"""LegoLink of EPIC: choose the first tokens of each chunk, before any layer is computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy
from ragfuse.types.plan import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Lego(Policy):
    """Recomputes `first` leading tokens of each chunk. If `first` is 0, the ratio sets how many."""

    name: str = "lego"
    first: int = 0

    @cached_property
    def cost(self) -> PolicyCost:
        """The planner's cost: `first` tokens per chunk. If `first` is 0, the ratio decides."""
        return PolicyCost(tokens_per_chunk=self.first)

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the first candidates of each chunk. If the ratio is 1, return all candidates."""
        if not self.first:
            return super().choose(candidates, layer, active, deviation)
        if layer > 0 or candidates.ratio >= 1:
            return active
        return active[candidates.offset < self.first]
