"""Bootstrap intervals of a mean, and of the ratio of two means over paired samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
RESAMPLES = 2000
LEVEL = 0.95


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the 95% percentile bootstrap interval of the mean."""
    return _interval((np.asarray(values, float),), lambda x, axis: x.mean(axis))


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the 95% bootstrap interval of mean(ours) / mean(theirs), with paired resampling."""
    pair = np.asarray(ours, float), np.asarray(theirs, float)
    return _interval(pair, lambda a, b, axis: a.mean(axis) / b.mean(axis))


def _interval(samples: tuple[np.ndarray, ...], statistic: object) -> Interval:
    from scipy.stats import bootstrap

    if len(samples[0]) < 2 or all(np.ptp(each) == 0 for each in samples):
        value = float(statistic(*samples, axis=-1))  # type: ignore[operator]
        return value, value
    found = bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
