"""What a selection policy costs, declared by the policy itself, so that prefills can be planned without knowing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Needs = Literal["nothing", "all rows of a layer", "attention"]
"""What a policy needs before it knows its rows: nothing, K and V of all rows of one layer, a pass of attention."""


@dataclass(frozen=True)
class PolicyCost:
    """How many rows a policy computes, and what it needs before it knows them.

    Args:
        needs: What must be computed first.
        gradual: Whether the share of rows falls from layer to layer, as in CacheBlend 4.3.
        fixed_share: The share that the policy always takes, 0..1; None: the one that is asked for.
        tokens_per_chunk: Tokens that it takes of each chunk whatever is asked for; 0: it goes by the share.
    """

    needs: Needs = "nothing"
    gradual: bool = False
    fixed_share: float | None = None
    tokens_per_chunk: int = 0

    @property
    def is_adjustable(self) -> bool:
        """Whether more rows are computed at a higher ratio."""
        return self.fixed_share is None and not self.tokens_per_chunk

    def share_of(self, ratio: float, chunks: Sequence[int]) -> float:
        """Return the share of rows that is computed of chunks of so many tokens at a ratio.

        Args:
            ratio: The share that is asked for.
            chunks: Tokens of each chunk.
        """
        if not ratio or not chunks:
            return 0.0
        if self.fixed_share is not None:
            return self.fixed_share
        if self.tokens_per_chunk:
            return sum(min(self.tokens_per_chunk, n) for n in chunks) / sum(chunks)
        return ratio


BY_RATIO = PolicyCost()
"""Rows by the ratio, and nothing before them."""

CostOf = Callable[[str], PolicyCost]
"""Returns the cost of the policy of that name."""
