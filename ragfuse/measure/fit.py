"""Fit curves to timings by least squares of the relative error, with non-negative coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from ragfuse.plan.estimate import Blend, features
from ragfuse.types.profiles import FusedCost

MIN_TIMED_S = 1e-9
"""Smallest timing in seconds: a coarse clock may measure 0, and errors are divided by the timing."""
_NOTHING = 1e-50


def fitted(table: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Find the non-negative weights of the columns whose weighted sums are closest to `seconds`, by relative error.

    All subsets of the columns are tried, and the best least-squares solution without a negative weight is taken, so the
    result is exact. Of columns that are proportional to each other, the first gets the whole weight. A column of values
    near zero gets the weight 0.

    Args:
        table: One row of features per timing.
        seconds: The timings.

    Returns:
        One weight per column.
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
    """Fit the seconds of a full prefill of L tokens: return a, b, c of a + b L + c L^2, from (L, seconds)."""
    fixed, linear, square = fitted([(1, n, n * n) for n, _ in points], [seconds for _, seconds in points])
    return fixed, linear, square


def fitted_fused(points: Sequence[tuple[Blend, float]], n_layers: int) -> FusedCost:
    """Fit the cost of fused prefills, by what they compute, from (rows computed, seconds)."""
    table = [features(blend, n_layers) for blend, _ in points]
    return FusedCost(*fitted(table, [seconds for _, seconds in points]))
