"""High KV deviation (HKVD): rows whose KV changes most when they attend to the other chunks
(CacheBlend 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class Hkvd(Policy):
    """Recomputes rows with the highest KV deviation; `gradual` ranks them in every layer."""

    check_layer: int = 1
    gradual: bool = True

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return the deviations; None if they were not measured."""
        return deviation
