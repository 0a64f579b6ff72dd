"""The only process-wide state of ragfuse: loaded models, engines of equal settings, notes for the current answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ragfuse.process.fork import at_fork

T = TypeVar("T")


class _Lock:
    """The lock of this module's state. In a forked child it is free, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self.held = threading.RLock()
        at_fork(self)

    def renew(self) -> None:
        if self.held.acquire(blocking=False):
            self.held.release()
        else:
            self.held = threading.RLock()


_LOCK = _Lock()
_HELD: dict[Hashable, Any] = {}
_USED: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
_NOTED: ContextVar[list[str] | None] = ContextVar("ragfuse_noted", default=None)


def shared(name: Hashable, make: Callable[[], T]) -> T:
    """Return the object of that name; the first caller's `make` creates it, and later callers get the same one."""
    with _LOCK.held:
        if name not in _HELD:
            _HELD[name] = make()
        found: T = _HELD[name]
        return found


def shared_while_used(name: Hashable, make: Callable[[], T]) -> T:
    """Return the object of that name like `shared`, but keep only a weak reference to it."""
    with _LOCK.held:
        found: T | None = _USED.get(name)
        if found is None:
            _USED[name] = found = make()
        return found


def forget(held: object) -> None:
    """Drop an object that `shared` returned; the next caller creates a new one."""
    with _LOCK.held:
        for name in [name for name, value in _HELD.items() if value is held]:
            del _HELD[name]


@contextmanager
def noting() -> Iterator[list[str]]:
    """Collect the notes made in this block, by this thread and by those that run in a copy of its context."""
    noted: list[str] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def note(what: str) -> None:
    """Add a note to the answer that is being made, if any; equal notes are added once."""
    noted = _NOTED.get()
    if noted is not None and what not in noted:
        noted.append(what)
