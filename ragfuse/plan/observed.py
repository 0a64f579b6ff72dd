"""Corrections of measured timings by what recent answers took: read times of tiers, and compute time per row.

A disk that was measured cold is often read from the page cache, and a link may be busy. Arithmetic only: observations
are arguments and results, and stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, isfinite, log
from statistics import median

from ragfuse.plan.estimate import Estimate
from ragfuse.types.plan import Fetch
from ragfuse.types.profiles import FusedCost, MachineProfile

READINGS = 5
"""Number of last readings of a tier that count. Their median is used, so that one or two outliers change nothing."""
INITIAL_READINGS = (1.0, 1.0)
"""Readings assumed before any was made; three readings that agree outvote them."""
MAX_CORRECTION = 20.0
"""Most times by which a tier is assumed slower, or faster, than measured."""
MIN_CORRECTION = 1.25
"""A tier less than this many times slower or faster than measured is not corrected."""
MIN_TIER_SHARE = 0.2
"""Least share of a prompt's predicted loading time from which a tier's speed is inferred."""
MIN_LOAD_S = 1e-3
"""Least seconds of loading, predicted or actual, from which a tier's speed is inferred."""
MIN_PREFILL_ROWS = 64
"""Least rows of a prefill from which the time per row is inferred: with fewer, its fixed cost dominates."""

Seen = Mapping[str, tuple[float, ...]]
"""By tier: the last readings, oldest first, each the actual seconds divided by the measured ones."""


def seen_after(
    seen: Seen, machine: MachineProfile, fetches: Sequence[Fetch], layers_a_read: int, load_s: float
) -> Seen:
    """Return the readings, updated with one more prompt, whose loading took `load_s` seconds.

    If it loaded from several tiers, the predicted times of all of them are corrected by the same factor.

    Args:
        seen: The readings so far.
        machine: The measured timings.
        fetches: What the prompt loaded.
        layers_a_read: Layers that each read loaded.
        load_s: Seconds that all loading took.
    """
    current = {tier: factor(readings) for tier, readings in seen.items()}
    measured = _loads_s(machine, fetches, layers_a_read)
    predicted = {tier: current.get(tier, 1.0) * seconds for tier, seconds in measured.items()}
    total_s = sum(predicted.values())
    if not (isfinite(load_s) and isfinite(total_s) and total_s > 0) or max(load_s, total_s) < MIN_LOAD_S:
        return seen
    tiers = [tier for tier, seconds in predicted.items() if seconds >= MIN_TIER_SHARE * total_s]
    return _noted(seen, {tier: current.get(tier, 1.0) * load_s / total_s for tier in tiers})


def forgotten_after(seen: Seen, tiers: Sequence[str]) -> Seen:
    """Return the readings after a prompt that left these tiers unread: each moves back towards its measured speed.

    So a tier that was once slow is tried again.
    """
    return _noted(seen, {tier: 1.0 for tier in tiers if tier in seen})


def rows_after(readings: Sequence[float], rows: float, seconds: float) -> tuple[float, ...]:
    """Return the seconds per row of the last prefills, with one more that computed `rows` rows in `seconds`."""
    usable = isfinite(seconds) and seconds > 0 and rows >= MIN_PREFILL_ROWS
    return (*readings, seconds / rows)[-READINGS:] if usable else tuple(readings)


def by_rows(readings: Sequence[float], n_layers: int) -> Estimate:
    """Return the estimate of computing for a machine that was not measured, from the seconds per row of prefills.

    The smallest of the readings counts, because other load on the machine only adds to them.
    """
    row_s = min(readings)
    return Estimate(MachineProfile("", "", 1, "", n_layers, (0.0, row_s, 0.0), FusedCost(0.0, row_s, 0.0, 0.0)))


def factor(readings: Sequence[float]) -> float:
    """Return the factor by which a tier is slower than measured: the median of its last readings."""
    return exp(median(log(reading) for reading in readings or INITIAL_READINGS))


def factors(seen: Seen) -> dict[str, float]:
    """Return the factor of each tier for which it is beyond `MIN_CORRECTION`."""
    found = {tier: factor(readings) for tier, readings in seen.items()}
    return {tier: times for tier, times in found.items() if not 1 / MIN_CORRECTION < times < MIN_CORRECTION}


def corrected(machine: MachineProfile, times: Mapping[str, float]) -> MachineProfile:
    """Return the machine's profile with the read times of these tiers multiplied by their factors."""
    tiers = dict(machine.tiers)
    for name in tiers.keys() & times:
        speed, by = tiers[name], times[name]
        tiers[name] = replace(speed, read_s=by * speed.read_s, byte_s=by * speed.byte_s)
    return replace(machine, tiers=tiers)


def _noted(seen: Seen, readings: Mapping[str, float]) -> Seen:
    """Append readings, each limited to `MAX_CORRECTION`."""
    bounded = {tier: min(MAX_CORRECTION, max(1 / MAX_CORRECTION, reading)) for tier, reading in readings.items()}
    before = {tier: seen.get(tier, INITIAL_READINGS) for tier in bounded}
    return {**seen, **{tier: (*before[tier], reading)[-READINGS:] for tier, reading in bounded.items()}}


def _loads_s(machine: MachineProfile, fetches: Sequence[Fetch], layers_a_read: int) -> dict[str, float]:
    """Return the measured seconds of each tier for its share of a prompt."""
    estimate, tiers = Estimate(machine), dict.fromkeys(fetch.tier for fetch in fetches if fetch.tier in machine.tiers)
    count = estimate.count(fetches, layers_a_read)
    shares = {tier: [fetch for fetch in fetches if fetch.tier == tier] for tier in tiers}
    return {tier: sum(estimate.steps_s(share, count)) for tier, share in shares.items()}
