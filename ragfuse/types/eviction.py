"""The eviction policies, named in this one place. Imports no torch, as settings use it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvictionPolicy:
    """One eviction policy.

    Args:
        name: Its name in settings and benchmarks.
        home: Its rank function (`plan.eviction_item.Rank`) as `module:function`, imported by `plan.ranks`.
        needs_arrivals: Whether it asks when an entry came, which tiers do not record: only simulations can use it.
    """

    name: str
    home: str
    needs_arrivals: bool = False


EVICTION_POLICIES = (
    EvictionPolicy("lru", "ragfuse.plan.ranks:by_use"),
    EvictionPolicy("fifo", "ragfuse.plan.ranks:by_arrival", needs_arrivals=True),
    EvictionPolicy("look-ahead", "ragfuse.plan.ranks:by_next_use"),
)
"""All eviction policies."""
EVICTION_NAMES = tuple(policy.name for policy in EVICTION_POLICIES if not policy.needs_arrivals)
"""Those that the setting `evict` may name."""
