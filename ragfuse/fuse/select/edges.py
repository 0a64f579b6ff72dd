"""The two extreme policies: recompute every row, which equals full prefill, or none, which is plain
reuse as in Prompt Cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class AllOrNothing(Policy):
    """Recomputes every row where its `fixed_share` is 1, and none where it is 0."""

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return all candidates, or none."""
        return active if self.fixed_share else active[:0]
