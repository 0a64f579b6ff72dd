"""KV at rest: tiers, the store over them, and the book beside them. It plans nothing and knows no model."""

from ragfuse.settings import Settings
from ragfuse.store.book import Book, KnownText
from ragfuse.store.disk import DiskTier
from ragfuse.store.memory import MemoryTier
from ragfuse.store.store import KVStore, StoreStats
from ragfuse.store.tier import EntryMeta, Evictor, Tier
from ragfuse.store.writer import Writer

__all__ = [
    "Book",
    "DiskTier",
    "EntryMeta",
    "Evictor",
    "KVStore",
    "KnownText",
    "MemoryTier",
    "StoreStats",
    "Tier",
    "Writer",
    "open_store",
]


def open_store(settings: Settings, evict: Evictor) -> KVStore:
    """The store that `settings` describe: memory, then disk; a tier of 0 bytes is left out. StoreError if unusable."""
    tiers: list[Tier] = []
    if settings.memory_bytes:
        tiers.append(MemoryTier(settings.memory_bytes, evict))
    if settings.disk_bytes:
        tiers.append(DiskTier(settings.store_path, settings.disk_bytes, evict))
    return KVStore(tiers, writer_queue=settings.writer_queue)
