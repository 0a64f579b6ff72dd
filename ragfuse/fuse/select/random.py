"""Random rows: the control that every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Recomputes the same random rows in every layer, drawn once with `seed`."""

    name: str = "random"
    seed: int = 0

    def score(self, candidates: Candidates, active: Tensor, deviation: Tensor | None) -> Tensor:
        """Return random scores, which depend only on `seed`."""
        draw = torch.rand(len(active), generator=torch.Generator().manual_seed(self.seed))
        return draw.to(active.device)
