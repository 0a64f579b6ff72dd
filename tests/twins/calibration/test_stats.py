"""Intervals: beside a bootstrap written out by hand."""

import random
from statistics import mean

import pytest

from ragfuse.calibration.stats import mean_interval, ratio_interval

VALUES = [random.Random(1).gauss(3, 1) for _ in range(60)]
OTHERS = [value * 2 + random.Random(index).gauss(0, 0.5) for index, value in enumerate(VALUES)]


def by_hand(statistic, n: int, draws: int = 4000) -> tuple[float, float]:
    rng = random.Random(5)
    found = sorted(statistic([rng.randrange(n) for _ in range(n)]) for _ in range(draws))
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def test_the_mean_s_interval_is_the_bootstrap_s():
    wanted = by_hand(lambda rows: mean(VALUES[i] for i in rows), len(VALUES))
    assert mean_interval(VALUES) == pytest.approx(wanted, abs=0.03)


def test_ratios_are_drawn_in_pairs():
    wanted = by_hand(
        lambda rows: sum(VALUES[i] for i in rows) / sum(OTHERS[i] for i in rows), len(VALUES)
    )
    assert ratio_interval(VALUES, OTHERS) == pytest.approx(wanted, abs=0.01)


def test_what_does_not_vary_has_no_width():
    assert mean_interval([0.5]) == (0.5, 0.5)
    assert ratio_interval([1.0, 1.0], [2.0, 2.0]) == (0.5, 0.5)
