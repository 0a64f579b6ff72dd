"""The eviction policies, named in this one place. Imports no torch, as settings use it too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EVICTION_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "lru": "ragfuse.plan.evict:by_use",
        "look-ahead": "ragfuse.plan.evict:by_next_use",
    }
)
"""The rank function (`plan.eviction_item.Rank`) of each policy as `module:function`, which
`plan.evict` imports.
"""
