"""Stored KV: tiers, the store that combines several tiers, and the catalog."""

from ragfuse.store.catalog import Catalog, KnownText, SessionInfo
from ragfuse.store.disk import DiskTier
from ragfuse.store.factory import open_catalog, open_store, open_tier
from ragfuse.store.levels import EncodedLayers
from ragfuse.store.memory import MemoryTier
from ragfuse.store.store import KVStore
from ragfuse.store.tier import EntryMeta, Tier

__all__ = [
    "Catalog",
    "DiskTier",
    "EncodedLayers",
    "EntryMeta",
    "KVStore",
    "KnownText",
    "MemoryTier",
    "SessionInfo",
    "Tier",
    "open_catalog",
    "open_store",
    "open_tier",
]
