"""A bounded mapping for several threads, which also holds in a forked child."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from cachetools import Cache, LRUCache

from ragfuse.process.fork import ForkLock

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Keep the `limit` values used last. Threads may share it.

    In a child that was forked while another thread changed it, it begins empty.

    Args:
        limit: Values kept; of more, the one used longest ago goes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = ForkLock(torn=self._begin)
        self._begin()

    def _begin(self) -> None:
        self._values: LRUCache[K, V] = LRUCache(self._limit)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value of `key`, which counts as a use, or None."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: K, value: V) -> V:
        """Keep `value` in place of what was there, and return it."""
        with self._lock:
            self._values[key] = value
        return value

    def discard_where(self, test: Callable[[V], bool]) -> None:
        """Remove the values that `test` is true of. To look at one does not count as a use."""
        with self._lock:
            for key in [key for key in self._values if test(Cache.__getitem__(self._values, key))]:
                del self._values[key]

    def discard(self, keys: Iterable[K]) -> None:
        """Remove these keys, where they are there."""
        with self._lock:
            for key in keys:
                self._values.pop(key, None)

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._begin()
