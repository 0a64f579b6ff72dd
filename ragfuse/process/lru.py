"""A bounded mapping that is safe with threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """A mapping of at most `limit` values that drops the one used longest ago. Thread-safe.

    Args:
        limit: Most values that are kept.
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._values: LRUCache[K, V] = LRUCache(limit)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value of `key`, or None; this counts as a use."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: K, value: V) -> V:
        """Store `value` under `key`, replacing any other value, and return it."""
        with self._lock:
            self._values[key] = value
        return value

    def discard(self, keys: Iterable[K]) -> None:
        """Remove these keys; missing ones are ignored."""
        with self._lock:
            for key in keys:
                self._values.pop(key, None)
