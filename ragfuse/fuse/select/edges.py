"""The two extreme policies: recompute every row, or none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy
from ragfuse.types.policy_cost import PolicyCost


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Recomputes every row, which equals full prefill."""

    name: str = "full"

    @property
    def cost(self) -> PolicyCost:
        """All rows, whatever the ratio."""
        return PolicyCost(fixed_share=1.0)

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return all candidates."""
        return active


@dataclass(frozen=True, kw_only=True)
class Nothing(Policy):
    """Recomputes no row: full KV reuse, as in Prompt Cache."""

    name: str = "none"

    @property
    def cost(self) -> PolicyCost:
        """No rows, whatever the ratio."""
        return PolicyCost(fixed_share=0.0)

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return no candidate."""
        return active[:0]
