"""The first tokens of every chunk (EPIC's LegoLink): static, so no layer is computed in full and nothing is checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Static
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Lego(Static):
    """The first `first` tokens of each chunk, or as many as the ratio allows when `first` is 0."""

    name: str = "lego"
    first: int = 0

    @property
    def cost(self) -> PolicyCost:
        """As many tokens of each chunk, where their number is fixed."""
        return PolicyCost(tokens_per_chunk=self.first)

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """Those with the lowest offsets; ratio 1 takes all."""
        if layer > 0 or view.ratio >= 1:
            return alive
        if self.first:
            return alive[view.offset < self.first]
        return alive[view.offset.argsort(stable=True)[: view.budget(view.ratio)].sort().values]
