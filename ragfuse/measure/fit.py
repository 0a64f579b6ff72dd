"""Curves through timings: least squares of the relative error, no coefficient below zero. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from ragfuse.fuse.select import cost_of
from ragfuse.plan.estimate import Blend, features
from ragfuse.types.profiles import FusedCost, FusedPoint

MIN_TIMED_S = 1e-9
"""What takes less is taken for this: a clock that stood still is no reason to divide by zero."""
_NOTHING = 1e-50


def fitted(table: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative weights of the columns whose sums come closest to `seconds`, relative to each.

    All sets of columns are tried; the best solution without negative weights is the least-squares one of its set. So it
    is exact, and columns that say the same share one weight. A column of hardly anything gets none.
    """
    rows = torch.tensor(table, dtype=torch.float64)
    rows = rows / torch.tensor(seconds, dtype=torch.float64).clamp_min(MIN_TIMED_S)[:, None]
    scale = rows.abs().amax(0)
    rows, scale = torch.where(scale > _NOTHING, rows, 0.0), scale.clamp_min(_NOTHING)
    wanted, n = torch.ones(len(rows), 1, dtype=torch.float64), rows.shape[1]
    best, weights = float(len(rows)), torch.zeros(n, dtype=torch.float64)
    for chosen in (list(each) for size in range(1, n + 1) for each in combinations(range(n), size)):
        columns = rows[:, chosen] / scale[chosen]
        found = torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
        error = float((columns @ found - wanted).square().sum())
        if bool(((found >= 0) & found.isfinite()).all()) and error < best * (1 - 1e-9):
            best, weights = error, torch.zeros(n, dtype=torch.float64)
            weights[chosen] = found[:, 0] / scale[chosen]
    return tuple(float(weight) for weight in weights)


def fitted_prefill(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """a, b, c of a + b L + c L^2 seconds, from (L, seconds)."""
    fixed, linear, square = fitted([(1, n, n * n) for n, _ in points], [seconds for _, seconds in points])
    return fixed, linear, square


def fitted_fused(points: Sequence[FusedPoint], n_layers: int) -> FusedCost:
    """What a fused prefill takes, by what it computes."""
    table = [features(Blend.of(point, cost_of), n_layers) for point in points]
    return FusedCost(*fitted(table, [point.seconds for point in points]))
