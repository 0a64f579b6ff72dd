"""High KV deviation (HKVD): choose the rows whose KV changes most when recomputed in the prompt
(CacheBlend 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class Hkvd(Policy):
    """Recomputes rows with the highest KV deviation; with `gradual`, fewer rows in later layers."""

    check_layer: int = 1
    gradual: bool = True

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return the KV deviations as scores. None if the deviations were not measured."""
        return deviation
