"""The open loop: independent arrivals, and what is heard."""

from __future__ import annotations

from itertools import pairwise

import pytest
from ragfuse_bench.throughput.load import (
    Heard,
    arrivals,
    counted,
    summed,
)


def test_arrivals_are_independent_of_each_other_and_as_many_as_the_rate_says():
    due = arrivals(5.0, 2000.0, seed=1)
    assert due == sorted(due) == arrivals(5.0, 2000.0, seed=1)
    assert due != arrivals(5.0, 2000.0, seed=2)
    assert 0 <= due[0] <= due[-1] < 2000
    assert len(due) == pytest.approx(10_000, rel=0.05)
    gaps = [late - early for early, late in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    # exponential
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_the_first_sixth_does_not_count_and_lost_requests_do():
    found = [Heard(float(at), 100.0 if at < 2 else float(at), 100.0 + at, 3) for at in range(11)]
    found.append(Heard(11.0, wrong="gone"))
    assert len(counted(found)) == 10
    told = summed(2.0, found)
    first = list(range(2, 11))
    assert told["mean_s"] == pytest.approx(sum(first) / len(first))
    assert told["p95_s"] == pytest.approx(2 + 0.95 * 8)
    assert (told["rate"], told["n"], told["lost"], told["wrong"]) == (2.0, 12, 1, ["gone"])
    assert told["tokens_per_s"] == pytest.approx(33 / 120)
    assert summed(1.0, [Heard(0.0, wrong="gone")])["mean_s"] is None
