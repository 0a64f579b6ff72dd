"""The base class of selection policies, and the candidate rows that policies choose from.

Candidates are rows of cached chunks. Forced rows (the question, chunks without cached KV, text
between chunks, the last token) are always computed. Forced rows and rows with exact KV are never
candidates. So a ratio means the same amount of work for every policy.
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
    """The C candidate rows of one prompt: the rows of cached chunks without exact KV.

    Args:
        rows: int64 [C], sorted: the candidates.
        offset: int64 [C], the index of each candidate inside the candidate's chunk.
        forced: int64 [F], sorted: the rows that are always computed.
        cached: bool [T], on the CPU: True for all rows of cached runs, except the last row of the
            prompt.
        n_layers: Number of layers of the model.
        ratio: Share of the candidates to recompute, 0..1.
        score: float32 [C], the score that `Policy.wants` names; rows with the highest scores are
            recomputed. None if there is no score.
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
        """Return how many candidates to recompute for a share of all candidates.

        The number is rounded so that the recomputed candidates and the forced rows together are a
        multiple of 16 rows, that is, whole matrix tiles. On CPUs with tile units, 408 rows take
        longer than 416 rows, and a row count that occurred before is faster than a new row count.
        Numbers under 32 are not rounded. So rounding changes a number by at most 25%, and changes
        a number of 64 or more by at most 12.5%.
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
        name: The policy's name in settings and traces.
        check_layer: The first layer in which rows are chosen. If 0, rows are chosen before anything
            is computed. Otherwise, earlier layers compute all candidates, and this layer computes
            keys and values of all candidates, so that the KV deviations are known.
        wants: What `Candidates.score` must contain. "attention" is the attention of the question's
            rows to each row, summed over `watched_layers`. Measuring takes an extra pass of the
            forced rows over the reused KV, through three quarters of the layers. "words" is how
            near each row is to words of the question (`select/lexical.py`), which needs no pass.
        fixed_share: Share of the candidates that the policy always recomputes. If None, the ratio
            sets the share.
    """

    name: str
    check_layer: int = 0
    wants: Wanted = "nothing"
    fixed_share: float | None = None

    @cached_property
    def cost(self) -> PolicyCost:
        """The cost for the planner: how many rows are recomputed, and what the choice needs."""
        needs: Needs = "all rows of a layer" if self.check_layer else "nothing"
        needs = "attention" if self.wants == "attention" else needs
        return PolicyCost(needs, self.fixed_share)

    def budget(self, candidates: Candidates, layer: int) -> int:
        """Return the number of candidates to recompute in `layer`."""
        share = self.fixed_share
        if share is None:
            share, first = candidates.ratio, self.check_layer
            if first:
                share = schedule(share, layer, first, candidates.n_layers)
        return candidates.budget(share)

    def thins(self, candidates: Candidates, layer: int, active: int) -> bool:
        """True if `choose` will drop some of the `active` candidates in `layer` by KV deviation.

        `layer` must be after the check layer. The caller measures the KV deviation in the previous
        layer only if `thins` returns True, because measuring takes time.
        """
        return self.check_layer > 0 and self.budget(candidates, layer) < active

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the candidates to recompute in `layer`: the highest scores within the budget.

        Args:
            candidates: The candidates of the prompt.
            layer: Index of the layer.
            active: int64 [m], sorted: the candidates computed in the previous layer, as indices
                into `candidates`.
            deviation: float32 [m], how far the computed KV of `active` is from the cached KV. In
                the check layer, this is measured in `layer` itself. In later layers, this is
                measured in the layer before `layer`. None if not measured.

        Returns:
            int64, a sorted subset of `active`. With ratio 1 every policy but `none` returns all of
            `active`, so that the result equals full prefill. With ratio 0, `HFModel.fuse` uses the
            policy `none`.
        """
        count = self.budget(candidates, layer)
        if count >= len(active):
            return active
        if not count:
            return active[:0]
        score = self.score(candidates, active, deviation)
        if score is None:
            return active
        return active.index_select(0, score.topk(count, sorted=False).indices.sort().values)

    def score(
        self, candidates: Candidates, active: Tensor, deviation: Tensor | None
    ) -> Tensor | None:
        """Return a score [m] for each active candidate. Candidates with high scores are recomputed.

        The result None means that all active candidates are recomputed. If `check_layer` is above
        0, this base class returns the KV deviation. If `check_layer` is 0, it returns the score
        that `wants` names. If `wants` is "nothing", the first tokens of each chunk score highest.

        Args:
            candidates: The candidates of the prompt.
            active: As in `choose`.
            deviation: As in `choose`.
        """
        if self.check_layer:
            return deviation
        if self.wants != "nothing":
            found = candidates.score
            return found.index_select(0, active) if found is not None else None
        return -(candidates.offset * len(candidates) + active)
