"""Choose the rows to which the question attends most, in the third quarter of the layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Candidates, Policy, Wanted


@dataclass(frozen=True, kw_only=True)
class Query(Policy):
    """Recomputes rows with the highest attention, equal in every layer."""

    name: str = "query"
    wants: Wanted = "attention"

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return the question's attention to each active candidate. None if not measured."""
        found = candidates.score
        return found.index_select(0, active) if found is not None else None
