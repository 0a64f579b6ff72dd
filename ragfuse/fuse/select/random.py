"""Choose random rows, as the control that every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Recomputes random rows, drawn once with `seed` and equal in every layer."""

    name: str = "random"
    seed: int = 0

    def score(self, candidates: Candidates, active: Tensor, deviation: Tensor | None) -> Tensor:
        """Return random scores, which depend only on `seed` and the number of candidates."""
        draw = torch.rand(len(active), generator=torch.Generator().manual_seed(self.seed))
        return draw.to(active.device)
