"""Eviction policies: which item goes first. Each is a function, and a line in `RANKS`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ragfuse.errors import SettingsError
from ragfuse.plan.eviction_item import EvictionItem, Rank


def by_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Least recently used first."""
    return 0, item.last_used


def by_arrival(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """What came first goes first, however often it was used since."""
    return 0, item.arrived


def by_next_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """First what no job waits for, least recently used first; then from the tail of the queue to its head.

    AttentionStore, section 3.3.2: what is in the look-ahead window is exempt, and where all is, its tail goes first.
    """
    return (0, item.last_used) if place is None else (1, -place)


RANKS: Mapping[str, Rank] = MappingProxyType({"lru": by_use, "fifo": by_arrival, "look-ahead": by_next_use})
"""The policies, by name."""


def rank_named(name: str) -> Rank:
    """The policy of that name; SettingsError if there is none."""
    if name not in RANKS:
        raise SettingsError(f"There is no eviction policy '{name}'. It is one of: {', '.join(RANKS)}.")
    return RANKS[name]
