"""The first tokens of every chunk (LegoLink of EPIC); needs no fully computed layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy
from ragfuse.types.plan import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Lego(Policy):
    """Recomputes the `first` tokens of each chunk; 0: the ratio decides the number."""

    name: str = "lego"
    first: int = 0

    @cached_property
    def cost(self) -> PolicyCost:
        """A fixed number of tokens per chunk; the ratio decides if `first` is 0."""
        return PolicyCost(tokens_per_chunk=self.first)

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the rows with the lowest offsets in their chunks; ratio 1 selects all."""
        if not self.first:
            return super().choose(candidates, layer, active, deviation)
        if layer > 0 or candidates.ratio >= 1:
            return active
        return active[candidates.offset < self.first]
