"""The eviction policies. Each is a rank function that `types.eviction` names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from ragfuse.errors import SettingsError
from ragfuse.plan.eviction_item import EvictionItem, Rank
from ragfuse.types.eviction import EVICTION_POLICIES


def by_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items by last use: least recently used first."""
    return 0, item.last_used


def by_arrival(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items by arrival: first in, first out, whatever their use."""
    return 0, item.arrived


def by_next_use(item: EvictionItem, place: float | None) -> tuple[int, float]:
    """Rank items by next use: first those that no job waits for, least recently used first; then from tail to head.

    AttentionStore, section 3.3.2: items in the look-ahead window are exempt; where all are, its tail goes first.
    """
    return (0, item.last_used) if place is None else (1, -place)


def _rank(home: str) -> Rank:
    """Import a rank function by `module:function`."""
    module, _, name = home.partition(":")
    found: Rank = getattr(import_module(module), name)
    return found


RANKS: Mapping[str, Rank] = MappingProxyType({policy.name: _rank(policy.home) for policy in EVICTION_POLICIES})
"""The rank function of every policy, by name."""


def rank_named(name: str) -> Rank:
    """Return the policy of a name; raise SettingsError where there is none."""
    if name not in RANKS:
        raise SettingsError(f"There is no eviction policy '{name}'. It is one of: {', '.join(RANKS)}.")
    return RANKS[name]
