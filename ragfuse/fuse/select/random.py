"""Random rows: the control that every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, best


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Recomputes the same random rows in every layer, drawn with `seed`."""

    name: str = "random"
    seed: int = 0

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return rows drawn at layer 0 and kept in all later layers."""
        if layer > 0:
            return active
        draw = torch.rand(len(active), generator=torch.Generator().manual_seed(self.seed))
        return best(active, draw.to(active.device), self.budget(candidates, layer))
