"""Decisions about tiers: which one a new chunk is written to, what is prefetched from slow ones
(AttentionStore 3.3), and how many layers are read before a prefill (3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from types import MappingProxyType
from typing import TypeVar

from ragfuse.plan.cost import CostModel
from ragfuse.types.plan import LoadPlan

T = TypeVar("T")

PRICES: Mapping[str, float] = MappingProxyType(
    {"memory": 3.0, "disk": 0.08, "redis": 5.0, "objects": 0.023}
)
"""The price of a gigabyte (10^9 bytes) per month, by kind of tier; only their order matters."""


def choose_tier(
    n_tokens: int, nbytes: int, costs: CostModel, tiers: Mapping[str, Sequence[str]], ratio: float
) -> str | None:
    """Return the cheapest tier that loads a new chunk at least as fast as its tokens are
    recomputed; else the fastest.

    CacheBlend 5.1: T_recompute(r*, L) >= T_load(L, tier), and of these the least C_store.

    Args:
        n_tokens: Tokens of the chunk.
        nbytes: Bytes of the chunk as raw.
        costs: What reading and computing cost on this machine.
        tiers: The tiers to choose from, with the codec levels that each stores. Of several levels,
            the fastest one counts for loading, and all count for the price.
        ratio: The recompute ratio.

    Returns:
        The name of the tier, the faster of two that cost the same; None if no tier was measured.
    """
    known = {
        tier: [level for level in levels if costs.knows_level(level)]
        for tier, levels in tiers.items()
        if tier in costs.tiers
    }
    load_s = {
        tier: min(costs.stored_s(tier, level, nbytes, n_tokens) for level in levels)
        for tier, levels in known.items()
        if levels
    }

    def price(tier: str) -> float:
        kind = next((PRICES[kind] for kind in PRICES if tier.startswith(kind)), inf)
        return kind * sum(costs.packed.get(level, 1.0) for level in known[tier])

    limit_s = costs.recompute_s(ratio, n_tokens)
    hidden = [tier for tier, seconds in load_s.items() if seconds <= limit_s]
    if not hidden:
        return min(load_s, key=lambda tier: load_s[tier], default=None)
    return min(hidden, key=lambda tier: (price(tier), load_s[tier]))


def to_prefetch(waiting: Iterable[tuple[T, int]], memory_bytes: int) -> Iterator[T]:
    """Yield conversations in queue order while they fit in memory together.

    Section 3.3.1, by bytes where the paper counts conversations of average size. It ends at the
    first that does not fit, so that later ones do not take its room.

    Args:
        waiting: Conversations of the waiting jobs with their stored bytes, from head to tail.
        memory_bytes: Bytes of memory for them.
    """
    for conversation, nbytes in waiting:
        memory_bytes -= nbytes
        if memory_bytes < 0:
            return
        yield conversation


def layers_before(plan: LoadPlan, n_layers: int) -> int:
    """Return how many layers to read before a prefill, so that none waits for its KV.

    S_buf = B(T_load L_hist - T_pref L_new) of section 3.2.1, in layers, rounded up; 0 where this
    machine was not measured, or loading hides behind the prefill anyway.
    """
    forecast = plan.forecast
    if forecast is None or not plan.fetches or forecast.load_s <= 0:
        return 0
    share = 1 - forecast.recompute_s / forecast.load_s
    return max(0, ceil(n_layers * share - 1e-9))
