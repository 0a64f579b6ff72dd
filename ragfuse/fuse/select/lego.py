"""LegoLink of EPIC: choose the first tokens of each chunk. Needs no fully computed layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy
from ragfuse.types.plan import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Lego(Policy):
    """Recomputes the first `first` tokens of each chunk; if `first` is 0, the ratio's share."""

    name: str = "lego"
    first: int = 0

    @cached_property
    def cost(self) -> PolicyCost:
        """The cost: `first` tokens per chunk. If `first` is 0, the ratio sets the number."""
        return PolicyCost(tokens_per_chunk=self.first)

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the candidates with the lowest offsets in the chunks. Ratio 1 selects all."""
        if not self.first:
            return super().choose(candidates, layer, active, deviation)
        if layer > 0 or candidates.ratio >= 1:
            return active
        return active[candidates.offset < self.first]
