"""KV at rest: tiers, the store over them, and the book beside them. It plans nothing and knows no model."""

from ragfuse.store.book import Book, KnownText
from ragfuse.store.disk import DiskTier
from ragfuse.store.memory import MemoryTier
from ragfuse.store.opening import open_store, open_tier
from ragfuse.store.reading import Encoded
from ragfuse.store.session_book import SessionBook, SessionLine
from ragfuse.store.store import KVStore, StoreStats
from ragfuse.store.tier import EntryMeta, Evictor, Tier
from ragfuse.store.writer import Writer, countdown

__all__ = [
    "Book",
    "DiskTier",
    "Encoded",
    "EntryMeta",
    "Evictor",
    "KVStore",
    "KnownText",
    "MemoryTier",
    "SessionBook",
    "SessionLine",
    "StoreStats",
    "Tier",
    "Writer",
    "countdown",
    "open_store",
    "open_tier",
]
