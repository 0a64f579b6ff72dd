"""The choice of tier for a new chunk. Decisions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType

from ragfuse.plan.cost import CostModel
from ragfuse.types.choices import LEVEL_NAMES

RAW_ALONE: Mapping[str, Sequence[str]] = MappingProxyType({})

PRICES: Mapping[str, float] = MappingProxyType(
    {"memory": 3.0, "disk": 0.08, "redis": 5.0, "objects": 0.023}
)
"""The price of a gigabyte (10^9 bytes) per month, by kind of tier; only their order matters."""


def store_cost(nbytes: int, price: float) -> float:
    """Return C_store of CacheBlend 5.1: the cost of storing `nbytes` for a month, at a price per
    gigabyte (10^9) and month.
    """
    return nbytes / 1e9 * price


def price_of(tier: str, prices: Mapping[str, float]) -> float:
    """Return the price of a tier, by its name or else by its kind (a prefix of the name); infinite
    if unknown.
    """
    kinds = (kind for kind in prices if tier.startswith(kind))
    return prices[tier] if tier in prices else min((prices[kind] for kind in kinds), default=inf)


def choose_tier(
    n_tokens: int,
    nbytes: int,
    costs: CostModel,
    tiers: Sequence[str],
    prices: Mapping[str, float],
    ratio: float,
    written: Mapping[str, Sequence[str]] = RAW_ALONE,
) -> str | None:
    """Return the cheapest tier that loads a new chunk at least as fast as its tokens are
    recomputed; else the fastest.

    CacheBlend 5.1: T_recompute(r*, L) >= T_load(L, tier).

    Args:
        n_tokens: Tokens of the chunk.
        nbytes: Bytes of the chunk as raw.
        costs: What reading and computing cost on this machine.
        tiers: Names of the tiers to choose from.
        prices: Price per gigabyte and month, by name or kind of tier.
        ratio: The recompute ratio.
        written: Codec levels that each tier stores, by default raw. Of several levels, the fastest
            one counts for loading, and all count for the cost.

    Returns:
        The name of the tier, the faster of two that cost the same; None if no tier was measured.
    """
    load_s, price = dict[str, float](), dict[str, float]()
    for tier in tiers:
        levels = [level for level in written.get(tier, LEVEL_NAMES[:1]) if costs.knows_level(level)]
        if tier in costs.tiers and levels:
            load_s[tier] = min(costs.stored_s(tier, level, nbytes, n_tokens) for level in levels)
            stored_nbytes = sum(nbytes * costs.packed.get(level, 1.0) for level in levels)
            price[tier] = store_cost(round(stored_nbytes), price_of(tier, prices))
    hidden = [
        tier for tier, seconds in load_s.items() if seconds <= costs.recompute_s(ratio, n_tokens)
    ]
    if not hidden:
        return min(load_s, key=lambda tier: load_s[tier], default=None)
    return min(hidden, key=lambda tier: (price[tier], load_s[tier]))
