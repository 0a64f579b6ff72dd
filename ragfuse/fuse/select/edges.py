"""The two ends: everything and nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Static
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Full(Static):
    """Every row: full prefill."""

    name: str = "full"

    @property
    def cost(self) -> PolicyCost:
        """Every row, whatever is asked for."""
        return PolicyCost(fixed_share=1.0)

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """All that are left."""
        return alive


@dataclass(frozen=True, kw_only=True)
class Nothing(Static):
    """No row: full KV reuse (Prompt Cache)."""

    name: str = "none"

    @property
    def cost(self) -> PolicyCost:
        """No row, whatever is asked for."""
        return PolicyCost(fixed_share=0.0)

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """None of them."""
        return alive[:0]
