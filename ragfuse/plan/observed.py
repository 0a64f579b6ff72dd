"""How much longer tiers take to be read than was measured, and how long rows take to compute, by what answers took.

A disk that was measured cold is read warm as often as not, and a line may be busy. Arithmetic only: what was seen is
handed in and given back, and kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, isfinite, log
from statistics import median

from ragfuse.plan.estimate import Estimate
from ragfuse.types.plan import Fetch
from ragfuse.types.profiles import MachineProfile, TierSpeed

READINGS = 5
"""Readings of a tier that count, of which the middle one is believed: one or two that are far off change nothing."""
BEFORE = (1.0, 1.0)
"""What is believed before anything was seen: three readings that agree outvote it."""
MAX_CORRECTION = 20.0
"""A tier is taken to be at most so many times slower, or faster, than measured."""
MATTERS = 1.25
"""Less than so many times slower or faster is as good as measured."""
MIN_TIER_SHARE = 0.2
"""A tier that a prompt's loading leaves less of says nothing of its speed."""
MIN_LOAD_S = 1e-3
"""Loading that is foretold and done in less says nothing either."""
LEAST_ROWS = 64
"""A prefill of fewer rows says more of what every prefill takes than of a row."""

Seen = Mapping[str, tuple[float, ...]]
"""By tier: the last readings, oldest first, each the seconds that it took over those that were measured."""


def seen_after(
    seen: Seen, machine: MachineProfile, fetches: Sequence[Fetch], layers_a_read: int, load_s: float
) -> Seen:
    """With one more prompt, which was `load_s` seconds in reading; several tiers share that as they share the time."""
    believed = {tier: factor(readings) for tier, readings in seen.items()}
    measured = _loads_s(machine, fetches, layers_a_read)
    foretold = {tier: believed.get(tier, 1.0) * seconds for tier, seconds in measured.items()}
    total_s = sum(foretold.values())
    if not (isfinite(load_s) and isfinite(total_s) and total_s > 0) or max(load_s, total_s) < MIN_LOAD_S:
        return seen
    tiers = [tier for tier, seconds in foretold.items() if seconds >= MIN_TIER_SHARE * total_s]
    return _noted(seen, {tier: believed.get(tier, 1.0) * load_s / total_s for tier in tiers})


def forgotten_after(seen: Seen, tiers: Sequence[str]) -> Seen:
    """After a prompt that left what these tiers have unread: a tier that nobody reads is believed again some time."""
    return _noted(seen, {tier: 1.0 for tier in tiers if tier in seen})


def rows_after(readings: Sequence[float], rows: float, seconds: float) -> tuple[float, ...]:
    """Seconds of a row in the last prefills, with one more, which computed so many rows in so many seconds."""
    usable = isfinite(seconds) and seconds > 0 and rows >= LEAST_ROWS
    return (*readings, seconds / rows)[-READINGS:] if usable else tuple(readings)


def row_s(readings: Sequence[float]) -> float | None:
    """Seconds that computing a row takes: the least of the last readings, as all that ran beside them only adds to
    them; None where there is none."""
    return min(readings, default=None)


def factor(readings: Sequence[float]) -> float:
    """How many times as long as measured a tier takes, by its last readings; never beyond `MAX_CORRECTION`."""
    return exp(median(log(reading) for reading in readings or BEFORE))


def factors(seen: Seen) -> dict[str, float]:
    """The same for all tiers that take so much more or less than measured that it matters."""
    found = {tier: factor(readings) for tier, readings in seen.items()}
    return {tier: times for tier, times in found.items() if not 1 / MATTERS < times < MATTERS}


def corrected(machine: MachineProfile, times: Mapping[str, float]) -> MachineProfile:
    """The machine with reading from these tiers taking so many times as long."""
    tiers = {name: _slowed(speed, times[name]) if name in times else speed for name, speed in machine.tiers.items()}
    return replace(machine, tiers=tiers)


def _slowed(speed: TierSpeed, times: float) -> TierSpeed:
    return replace(speed, open_s=times * speed.open_s, read_s=times * speed.read_s, byte_s=times * speed.byte_s)


def _noted(seen: Seen, readings: Mapping[str, float]) -> Seen:
    """With these readings, none beyond the bounds."""
    bounded = {tier: min(MAX_CORRECTION, max(1 / MAX_CORRECTION, reading)) for tier, reading in readings.items()}
    return {**seen, **{tier: (*seen.get(tier, BEFORE), reading)[-READINGS:] for tier, reading in bounded.items()}}


def _loads_s(machine: MachineProfile, fetches: Sequence[Fetch], layers_a_read: int) -> dict[str, float]:
    """Seconds that each tier was measured to take for its share of a prompt."""
    times, tiers = Estimate(machine), dict.fromkeys(fetch.tier for fetch in fetches if fetch.tier in machine.tiers)
    count = times.count(fetches, layers_a_read)
    shares = {tier: [fetch for fetch in fetches if fetch.tier == tier] for tier in tiers}
    return {tier: sum(times.steps_s(share, count)) for tier, share in shares.items()}
