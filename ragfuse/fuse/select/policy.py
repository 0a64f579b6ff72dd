"""The interface of selection policies: the candidates that a policy is given and the rows that it
returns.

Candidates are rows of cached chunks. Forced rows (the question, misses, text between chunks, the
last token) are computed in any case and are not candidates, nor are rows of an exact prefix. So the
same ratio means the same work for every policy.
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
        score: float32 [C], as `Policy.wants` says, higher is better; None if the policy wants
            nothing.
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
        """Return the number of rows for a share of the candidates, such that all computed rows fill
        whole matrix tiles.

        The total with the forced rows is rounded to the nearest multiple of 16: on CPUs with tile
        units 408 rows take longer than 416, and a number of rows used before is faster than a new
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
    """A selection policy: chooses the candidate rows that are recomputed in each layer. Each
    derives from this one.

    Args:
        name: The name by which settings choose it and traces report it.
        check_layer: The first layer whose rows are chosen; 0: they are chosen before anything is
            computed. Below it all candidates are computed, and in it their K and V, so that
            deviations are known there.
        wants: What `Candidates.score` must hold. "attention": the attention that the question's
            rows pay to each row over the reused KV, in `watched_layers`; costs a pass of the forced
            rows through three quarters of the layers. "words": how near each row is to words of the
            question (`select/lexical.py`); costs no pass.
        gradual: True: fewer rows are kept in each later layer; False: the same in all layers.
        fixed_share: A share of the candidates that it recomputes whatever the ratio; None: by the
            ratio.
    """

    name: str
    check_layer: int = 0
    wants: Wanted = "nothing"
    gradual: bool = False
    fixed_share: float | None = None

    @cached_property
    def cost(self) -> PolicyCost:
        """The work before rows can be chosen, and the number of rows, for the planner."""
        needs: Needs = "all rows of a layer" if self.check_layer else "nothing"
        needs = "attention" if self.wants == "attention" else needs
        return PolicyCost(needs, self.fixed_share)

    def budget(self, candidates: Candidates, layer: int) -> int:
        """Return the number of rows for the share that `layer` has."""
        share = self.fixed_share
        if share is None:
            share = schedule(
                candidates.ratio, layer, self.check_layer, candidates.n_layers, self.gradual
            )
        return candidates.budget(share)

    def thins(self, candidates: Candidates, layer: int, active: int) -> bool:
        """Whether `choose` will drop some of the `active` rows by their deviation in `layer`, which
        lies after the check layer.

        Only then is the deviation measured in the layer before, because measuring costs time.
        """
        return self.check_layer > 0 and self.gradual and self.budget(candidates, layer) < active

    def choose(
        self, candidates: Candidates, layer: int, active: Tensor, deviation: Tensor | None
    ) -> Tensor:
        """Return the candidates to recompute in `layer`: those with the highest scores, as many as
        its share allows.

        Args:
            candidates: The candidates of the prompt.
            layer: Index of the layer.
            active: int64 [m], sorted: the candidates computed in the layer before, as indices into
                `candidates`.
            deviation: float32 [m], how far their newest computed KV is from the cached KV; None if
                not measured. At the check layer it is measured in `layer` itself, after that in the
                layer before.

        Returns:
            int64, a sorted subset of `active`; all of it where `candidates.ratio` is 1, so that a
            prompt equals its full prefill. `choose` is never called with a ratio of 0, for which
            `HFModel.fuse` uses the policy `none`.
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
        """Return how much is gained by recomputing each active candidate, [m]; None: it is not
        known, and all stay active. Here: the first tokens of every chunk score highest.

        Args:
            candidates: The candidates of the prompt.
            active: As in `choose`.
            deviation: As in `choose`.
        """
        return -(candidates.offset * len(candidates) + active)


def best(active: Tensor, score: Tensor, count: int) -> Tensor:
    """Return the `count` members of `active` [m] with the highest `score` [m], sorted by index."""
    if count >= len(active):
        return active
    return active.index_select(0, score.topk(count, sorted=False).indices.sort().values)
