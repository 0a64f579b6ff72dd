"""The cost of a selection policy, declared by the policy itself, so that `ragfuse.plan` needs to
name no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AUTO = "auto"
"""The policy name that stands for the model's own choice where it applies, else for the
controller's `MEASURED`.
"""
STAIRS = 8
"""Most different numbers of rows that a gradual policy computes; attention is planned anew for
each.
"""
Needs = Literal["nothing", "all rows of a layer", "attention"]
"""What a policy needs before it can choose its rows: nothing, K and V of all rows of one layer, or
a pass over the first three quarters of the layers that measures the question's attention.
"""


def watched_layers(n_layers: int) -> range:
    """Return the layers in which the question's attention is measured: the third quarter of a
    model's layers.

    The middle layers of a model show which rows a question needs: earlier layers attend to nearby
    tokens, later ones to the next token. The pass ends after the last of these layers.
    """
    first = n_layers // 2
    return range(first, max(first + 1, 3 * n_layers // 4))


def schedule(ratio: float, layer: int, first: int, n_layers: int, gradual: bool) -> float:
    """Return the share of candidates to recompute in `layer` (CacheBlend 4.3).

    Args:
        ratio: The mean share over layers first..n_layers-1, which both schedules keep, also where
            1.5 ratio exceeds 1.
        layer: Index of the layer.
        first: The first layer whose rows are chosen.
        n_layers: Layers of the model.
        gradual: False: `ratio` in every layer; True: falling from 1.5 ratio to 0.5 ratio, in at
            most `STAIRS` stairs of equally many layers, as choosing rows anew takes a dozen
            operations.
    """
    n_scheduled = n_layers - first
    if not gradual or n_scheduled < 2:
        return ratio
    width = -(-n_scheduled // STAIRS)
    stair = (layer - first) // width * width
    middle = (stair + min(stair + width, n_scheduled) - 1) / 2
    start = min(1.0, 1.5 * ratio)
    return start + 2 * (ratio - start) * middle / (n_scheduled - 1)


@dataclass(frozen=True)
class PolicyCost:
    """How many rows a policy recomputes, and what it needs before it can choose them.

    Args:
        needs: What must be computed first.
        gradual: Whether the share of rows falls from layer to layer, as in CacheBlend 4.3.
        fixed_share: A share of rows that the policy always recomputes, 0..1; None: the recompute
            ratio decides.
        tokens_per_chunk: Tokens of each chunk that it recomputes whatever the ratio; 0: the ratio
            decides.
    """

    needs: Needs = "nothing"
    gradual: bool = False
    fixed_share: float | None = None
    tokens_per_chunk: int = 0

    @property
    def is_adjustable(self) -> bool:
        """Whether a higher ratio recomputes more rows."""
        return self.fixed_share is None and not self.tokens_per_chunk

    def share_of(self, ratio: float, chunks: Sequence[int]) -> float:
        """Return the share of the chunks' rows that is recomputed: none at ratio 0 and all at 1,
        whatever the policy.

        Args:
            ratio: The recompute ratio, 0..1.
            chunks: Number of tokens of each chunk.
        """
        if not ratio or not chunks:
            return 0.0
        if ratio >= 1:
            return 1.0
        if self.fixed_share is not None:
            return self.fixed_share
        if self.tokens_per_chunk:
            return sum(min(self.tokens_per_chunk, n) for n in chunks) / sum(chunks)
        return ratio


BY_RATIO = PolicyCost()
"""The cost of a policy that follows the ratio and needs nothing first."""
