"""Process-wide objects, notes for answers, and a bounded, thread-safe mapping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, NoReturn, Self, TypeVar
from weakref import WeakValueDictionary

from cachetools import LRUCache

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """A mapping that evicts the least recently used value. Thread-safe.

    Args:
        limit: Maximum number of values.
    """

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._values: LRUCache[K, V] = LRUCache(limit)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value of `key` and mark the value as used. A missing key gives None."""
        with self._lock:
            return self._values.get(key)

    def add(self, key: K, value: V) -> V:
        """Store `value` under `key`, in place of an earlier value, and return `value`."""
        with self._lock:
            self._values[key] = value
        return value

    def discard(self, keys: Iterable[K]) -> None:
        """Remove these keys; missing keys are ignored."""
        with self._lock:
            for key in keys:
                self._values.pop(key, None)


T = TypeVar("T")


ALL_CORES = threading.Lock()
"""A lock for work that uses all cores: only one thread does such work at a time."""
_LOCK = threading.RLock()
_SHARED: dict[Hashable, tuple[Hashable, Any]] = {}
"""(version, object) of every object that `shared` created, by name."""
_USED: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
_NOTES: ContextVar[list[str] | None] = ContextVar("ragfuse_noted", default=None)


class OneProcess:
    """Base class of objects of one process. Copying returns the object itself; pickling fails."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"{name} objects cannot be pickled, because they belong to one process. Send the"
            f" arguments, such as Settings, and create the {name} in the other process."
        )


def shared(name: Hashable, make: Callable[[], T], version: Hashable = None) -> T:
    """Return the process-wide object called `name`, which `make` creates on first use.

    If the existing object has another `version`, it is dropped and `make` creates a new object.
    """
    with _LOCK:
        if name not in _SHARED or _SHARED[name][0] != version:
            _SHARED.pop(name, None)
            _SHARED[name] = version, make()
        found: T = _SHARED[name][1]
        return found


def shared_while_used(name: Hashable, make: Callable[[], T]) -> T:
    """Like `shared`, but without versions. The object is freed when nothing else refers to it."""
    with _LOCK:
        found: T | None = _USED.get(name)
        if found is None:
            _USED[name] = found = make()
        return found


def forget(instance: object) -> None:
    """Drop an object that `shared` returned; the next call of `shared` creates a new object."""
    with _LOCK:
        for name in [name for name, (_, value) in _SHARED.items() if value is instance]:
            del _SHARED[name]


@contextmanager
def collect_notes() -> Iterator[list[str]]:
    """Collect the notes added inside the `with` block, including those of threads that run in a
    copy of the block's context.
    """
    notes: list[str] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def note(text: str) -> None:
    """Add a note to the answer in progress, if there is one. Duplicate notes are ignored."""
    notes = _NOTES.get()
    if notes is not None and text not in notes:
        notes.append(text)
