"""What every selection policy is told and what it returns.

Forced rows (the question, misses, joiners, the last token) are never a policy's business: they are computed anyway and
lie outside its budget. Rows of an exact prefix are not offered either. So equal ratio means equal work for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ragfuse.types.policy_cost import PolicyCost

TILE = 16
Compare = Literal["k", "v", "kv"]
Wanted = Literal["nothing", "attention", "words"]


@dataclass(frozen=True)
class Candidates:
    """The rows on offer: C rows of cached chunks that are no exact prefix.

    chunk, offset: int64 [C], the chunk each row belongs to and its place in it. score: float32 [C], what the
    policy wants to know of each row, higher is better. forced: rows computed in any case.
    """

    n_layers: int
    ratio: float
    forced: int
    chunk: Tensor
    offset: Tensor
    score: Tensor | None = None

    def __len__(self) -> int:
        return len(self.chunk)

    def budget(self, share: float) -> int:
        """Rows that `share` of the offer allows, such that all computed rows fill whole matrix tiles.

        The total is rounded to the nearest multiple of 16 (408 rows take longer than 416 on CPUs with tile units, and
        a new number of rows longer than one met before); budgets under 32 are left alone, so the share stays within a
        quarter of what was asked for, either way, and within an eighth from 64 rows on.
        """
        rows = round(share * len(self))
        if TILE * 2 <= rows < len(self):
            rows = round((rows + self.forced) / TILE) * TILE - self.forced
        return max(0, min(len(self), rows))


class Policy(Protocol):
    """Chooses the offered rows that are computed in each layer.

    check_layer: the first layer whose rows are chosen; all offered rows are computed below it, and their K and V in
    it, so that deviations are known there. 0: chosen before anything is computed.
    """

    @property
    def name(self) -> str:
        """How it is chosen and reported."""
        ...

    @property
    def cost(self) -> PolicyCost:
        """What it needs before it knows its rows, and how many these are, for whoever plans."""
        ...

    @property
    def check_layer(self) -> int:
        """First layer with chosen rows."""
        ...

    @property
    def compare(self) -> Compare:
        """What deviations are taken of."""
        ...

    @property
    def wants(self) -> Wanted:
        """What `Candidates.score` must be.

        attention: what the last prompt token pays to each row over the reused cache; costs a pass of the forced rows.
        words: how near each row is to words of the question (`select/words.py`); costs no pass.
        """
        ...

    def thins(self, view: Candidates, layer: int, alive: int) -> bool:
        """Whether `choose` will want to leave some of `alive` rows out in `layer`, after the check layer.

        Then their deviation is measured in the layer before; measuring costs time, so it is done only then.
        """
        ...

    def choose(self, view: Candidates, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """Indices into the offer to compute in `layer`: a sorted subset of `alive`, int64.

        alive: int64 [m], those computed in the layer before. deviation: float32 [m], how far their newest computed KV
        is from the cached (measured in `layer` itself at the check layer, in the layer before after it); None if
        nothing was measured.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Static:
    """What the policies share that choose before anything is computed and never measure a deviation."""

    check_layer: int = 0
    compare: Compare = "kv"
    wants: Wanted = "nothing"

    @property
    def cost(self) -> PolicyCost:
        """Rows by the ratio, and nothing before them."""
        return PolicyCost()

    def thins(self, view: Candidates, layer: int, alive: int) -> bool:
        """Never."""
        return False


def schedule(ratio: float, layer: int, first: int, n_layers: int, gradual: bool) -> float:
    """Share of rows for `layer`: `ratio`, or 1.5 ratio falling linearly to 0.5 ratio over layers first..n_layers-1.

    The mean over those layers is `ratio` either way, also where 1.5 ratio exceeds 1 (CacheBlend 4.3).
    """
    steps = n_layers - 1 - first
    if not gradual or steps <= 0:
        return ratio
    start = min(1.0, 1.5 * ratio)
    end = 2 * ratio - start
    return start + (end - start) * (layer - first) / steps


def best(alive: Tensor, score: Tensor, count: int) -> Tensor:
    """The `count` members of `alive` [m] with the highest `score` [m], in order."""
    if count >= len(alive):
        return alive
    return alive[score.topk(count, sorted=False).indices.sort().values]
