"""Choose random rows, as the control that every other policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Recomputes random rows, which are the same in every layer."""

    name: str = "random"

    def score(self, candidates: Candidates, active: Tensor, deviation: Tensor | None) -> Tensor:
        """Return random scores, which depend only on the number of candidates."""
        draw = torch.rand(len(active), generator=torch.Generator().manual_seed(0))
        return draw.to(active.device)
