"""Median seconds of cases that are timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from statistics import median

Progress = Callable[[str, float], object]
"""Called with a description of the current timing, and the share of all timings that is done (0 to 1)."""


def medians(
    cases: Mapping[str, Callable[[], float]], rounds: int, progress: Progress, budget_s: float = inf
) -> dict[str, float]:
    """Return the median seconds of each case; each round runs all cases once.

    Args:
        cases: Each returns how long it took, by its description.
        rounds: Number of rounds.
        progress: Called as the timings proceed.
        budget_s: Seconds after which no further round begins.
    """
    timings: dict[str, list[float]] = {name: [] for name in cases}
    began = time.perf_counter()
    for round_index in range(rounds):
        if round_index and time.perf_counter() - began > budget_s:
            break
        for index, (name, case) in enumerate(cases.items()):
            progress(name, (round_index + index / len(cases)) / rounds)
            timings[name].append(case())
    return {name: median(seconds) for name, seconds in timings.items()}
