"""The interface of selection policies: their candidates and their choice.

Candidates are rows of cached chunks. Forced rows (the question, misses, text between chunks, the
last token) are always computed and are not candidates, nor are rows of an exact prefix. So a ratio
means the same amount of work for every policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from ragfuse.types.plan import Needs, PolicyCost, schedule

TILE = 16
Wanted = Literal["nothing", "attention", "words"]


@dataclass(frozen=True)
class Candidates:
    """The C candidate rows of one prompt: rows of cached chunks that are not an exact prefix.

    Args:
        rows: int64 [C], sorted: the candidates.
        offset: int64 [C], each one's index inside its chunk.
        forced: int64 [F], sorted: the rows that are computed in any case.
        cached: bool [T], on the CPU: the rows that need not be computed, those of cached runs but
            the last row.
        n_layers: Layers of the model.
        ratio: Share of the candidates to recompute, 0..1.
        score: float32 [C], the score named by `Policy.wants`, higher is better; None without one.
    """

    rows: Tensor
    offset: Tensor
    forced: Tensor
    cached: Tensor
    n_layers: int
    ratio: float
    score: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def budget(self, share: float) -> int:
        """Return the number of rows for a share of the candidates, so that all rows fill whole
        matrix tiles.

        The total with the forced rows is rounded to the nearest multiple of 16. On CPUs with tile
        units 408 rows take longer than 416, and a recurring number of rows is faster than a new
        one. Budgets under 32 rows are not rounded, so the result stays within a quarter of the
        requested share, and within an eighth from 64 rows on.
        """
        rows = round(share * len(self))
        if TILE * 2 <= rows < len(self):
            n_forced = len(self.forced)
            rows = round((rows + n_forced) / TILE) * TILE - n_forced
        return max(0, min(len(self), rows))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base class of selection policies, which choose the candidate rows to recompute in each layer.

    Args:
        name: The name by which settings choose it and traces report it.
        check_layer: The first layer in which rows are chosen; 0: before anything is computed.
            Earlier layers compute all candidates, and this layer computes K and V of all, so that
            their deviations are known.
        wants: The content of `Candidates.score`. "attention": the attention of the question's rows
            to each row over the reused KV, in `watched_layers`; needs a pass of the forced rows
            through three quarters of the layers. "words": the nearness of each row to words of the
            question (`select/lexical.py`); needs no pass.
        gradual: True: later layers keep fewer rows; False: all layers keep the same rows.
        fixed_share: A share of candidates that it always recomputes; None: the ratio decides.
    """

    name: str
    check_layer: int = 0
    wants: Wanted = "nothing"
    gradual: bool = False
    fixed_share: float | None = None

    @cached_property
    def cost(self) -> PolicyCost:
        """Number of recomputed rows and the work before the choice, for the planner."""
        needs: Needs = "all rows of a layer" if self.check_layer else "nothing"
        needs = "attention" if self.wants == "attention" else needs
        return PolicyCost(needs, self.fixed_share)

    def budget(self, candidates: Candidates, layer: int) -> int:
        """Return the number of rows to recompute in `layer`."""
        share = self.fixed_share
        if share is None:
            share = schedule(
                candidates.ratio, layer, self.check_layer, candidates.n_layers, self.gradual
            )
        return candidates.budget(share)

    def thins(self, candidates: Candidates, layer: int, active: int) -> bool:
        """True if `choose` will drop some of the `active` rows in `layer` by their deviation.

        `layer` is after the check layer. Only then is the deviation measured in the previous layer,
        because measuring takes time.
        """
        return self.check_layer > 0 and self.gradual and self.budget(candidates, layer) < active

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the candidates to recompute in `layer`: the highest scores within its budget.

        Args:
            candidates: The candidates of the prompt.
            layer: Index of the layer.
            active: int64 [m], sorted: the candidates computed in the previous layer, as indices
                into `candidates`.
            deviation: float32 [m], the deviation of their latest computed KV from the cached KV;
                None if not measured. At the check layer it is measured in `layer` itself, later in
                the previous layer.

        Returns:
            int64, a sorted subset of `active`; all of it if `candidates.ratio` is 1, so that the
            result equals full prefill. `choose` is never called with ratio 0: `HFModel.fuse` then
            uses the policy `none`.
        """
        count = self.budget(candidates, layer)
        if count >= len(active):
            return active
        if not count:
            return active[:0]
        score = self.score(candidates, active, deviation)
        return active if score is None else best(active, score, count)

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return a score [m] per active candidate, higher first; None: keep all active. The default
        ranks the first tokens of each chunk highest.

        Args:
            candidates: The candidates of the prompt.
            active: As in `choose`.
            deviation: As in `choose`.
        """
        return -(candidates.offset * len(candidates) + active)


def best(active: Tensor, score: Tensor, count: int) -> Tensor:
    """Return the `count` members of `active` [m] with the highest `score` [m], in index order."""
    if count >= len(active):
        return active
    return active.index_select(0, score.topk(count, sorted=False).indices.sort().values)
