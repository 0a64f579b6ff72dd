"""Choose the tier of a new chunk, entries to prefetch from slow tiers (AttentionStore 3.3), and the
number of layers to read before a prefill (3.2.1).
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
"""The price of 10^9 bytes per month, by kind of tier; only the order matters."""


def choose_tier(
    n_tokens: int, nbytes: int, costs: CostModel, tiers: Mapping[str, Sequence[str]], ratio: float
) -> str | None:
    """Return the cheapest tier that loads a chunk at least as fast as it is recomputed, else the
    fastest.

    CacheBlend 5.1: the lowest C_store with T_recompute(r*, L) >= T_load(L, tier).

    Args:
        n_tokens: Tokens of the chunk.
        nbytes: Bytes of the chunk as raw.
        costs: Costs of reading and computing on this machine.
        tiers: The candidate tiers, with the codec levels that each stores. Loading counts the
            fastest level, the price counts all levels.
        ratio: The recompute ratio.

    Returns:
        The name of the tier; of equal prices, the faster one. None if no tier was measured.
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
    """Yield conversations in queue order while they fit into memory together.

    AttentionStore 3.3.1, by bytes instead of conversations of average size. Stops at the first one
    that does not fit, so that later ones do not take its room.

    Args:
        waiting: Conversations of the waiting jobs with their stored bytes, from head to tail.
        memory_bytes: Memory available for them.
    """
    for conversation, nbytes in waiting:
        memory_bytes -= nbytes
        if memory_bytes < 0:
            return
        yield conversation


def layers_before(plan: LoadPlan, n_layers: int) -> int:
    """Return the number of layers to read before a prefill, so that no layer waits for its KV.

    S_buf = B(T_load L_hist - T_pref L_new) of AttentionStore 3.2.1, in layers, rounded up. 0 on an
    unmeasured machine, or if the prefill hides loading anyway.
    """
    forecast = plan.forecast
    if forecast is None or not plan.fetches or forecast.load_s <= 0:
        return 0
    share = 1 - forecast.recompute_s / forecast.load_s
    return max(0, ceil(n_layers * share - 1e-9))
