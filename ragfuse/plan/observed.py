"""Corrections of a measured cost model by what recent answers took: read times of tiers, and
compute time per row.

A disk that was measured cold is often read from the page cache, and a link may be busy. Arithmetic
only: observations are arguments and results, and stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median

from ragfuse.plan.cost import Blend, CostModel, RowCost
from ragfuse.types.plan import LoadPlan

READINGS = 5
"""Number of last readings that count. Their median is used, so that one or two outliers change
nothing.
"""
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
"""Least rows of a prefill from which the time per row is inferred: with fewer, its fixed cost
dominates.
"""


@dataclass(frozen=True)
class Observed:
    """What recent answers took.

    Args:
        tiers: By tier: the last readings, oldest first, each the actual seconds divided by the
            measured ones.
        rows: Seconds per computed row of the last prefills, oldest first.
    """

    tiers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    rows: tuple[float, ...] = ()

    def times(self, tier: str) -> float:
        """Return how many times as long as measured a tier takes: the median of its last
        readings.
        """
        return exp(median(log(reading) for reading in self.tiers.get(tier, INITIAL_READINGS)))

    def loaded(self, measured: CostModel, plan: LoadPlan, load_s: float) -> Observed:
        """Return what is observed after one more plan, whose loading took `load_s` seconds.

        If it loaded from several tiers, the predicted times of all of them are corrected by the
        same factor. A tier that it left unread moves back towards its measured speed, so that a
        tier that was once slow is tried again.
        """
        read = {fetch.tier for fetch in plan.fetches} & measured.tiers.keys()
        shares = {tier: [fetch for fetch in plan.fetches if fetch.tier == tier] for tier in read}
        predicted = {
            tier: self.times(tier) * sum(measured.steps_s(share, plan.layers_a_read))
            for tier, share in shares.items()
        }
        total_s = sum(predicted.values())
        noted = {fetch.tier: 1.0 for fetch in plan.unread if fetch.tier in self.tiers}
        if total_s > 0 and max(load_s, total_s) >= MIN_LOAD_S:
            telling = (
                tier for tier, seconds in predicted.items() if seconds >= MIN_TIER_SHARE * total_s
            )
            noted |= {tier: self.times(tier) * load_s / total_s for tier in telling}
        found = dict(self.tiers)
        for tier, times in noted.items():
            bounded = min(max(times, 1 / MAX_CORRECTION), MAX_CORRECTION)
            found[tier] = (*found.get(tier, INITIAL_READINGS), bounded)[-READINGS:]
        return replace(self, tiers=found)

    def computed(self, plan: LoadPlan, n_layers: int, seconds: float) -> Observed:
        """Return what is observed after one more prefill, which took `seconds`."""
        rows = Blend.of(plan).rows(n_layers) if plan.fetches else len(plan.prompt)
        return (
            replace(self, rows=(*self.rows, seconds / rows)[-READINGS:])
            if rows >= MIN_PREFILL_ROWS
            else self
        )

    def applied(self, measured: CostModel | None, n_layers: int) -> CostModel | None:
        """Return the cost model that holds now: the measured one, with its tiers corrected.

        Where nothing was measured, it has no tiers, and a row costs the least of the last readings,
        as other load on the machine only adds to them; None before the first of them.
        """
        if measured is not None:
            tiers = dict(measured.tiers)
            for name in tiers.keys() & self.tiers:
                tier, times = tiers[name], self.times(name)
                if not 1 / MIN_CORRECTION < times < MIN_CORRECTION:
                    tiers[name] = replace(
                        tier, read_s=tier.read_s * times, byte_s=tier.byte_s * times
                    )
            return replace(measured, tiers=tiers)
        if not self.rows:
            return None
        row = RowCost(0.0, min(self.rows), 0.0)
        return CostModel("", "", 1, "", n_layers, row, row)
