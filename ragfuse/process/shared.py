"""What a whole process holds once: loaded models, engines of equal settings, and what went wrong beside the answer at
hand. The only such place in the house."""

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
    """The lock of all that is held here: free in a forked child, unless the thread that forked holds it."""

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
    """What `make` gave the first who asked for `name`; everybody after gets the same."""
    with _LOCK.held:
        if name not in _HELD:
            _HELD[name] = make()
        found: T = _HELD[name]
        return found


def shared_while_used(name: Hashable, make: Callable[[], T]) -> T:
    """The same, given to others as long as somebody holds it: nothing is kept for its sake alone."""
    with _LOCK.held:
        found: T | None = _USED.get(name)
        if found is None:
            _USED[name] = found = make()
        return found


def forget(held: object) -> None:
    """Let go of what was given to all; the next who asks gets a new one."""
    with _LOCK.held:
        for name in [name for name, value in _HELD.items() if value is held]:
            del _HELD[name]


@contextmanager
def noting() -> Iterator[list[str]]:
    """Collect what is noted in this block, in this thread and those that run in a copy of its context."""
    noted: list[str] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def note(what: str) -> None:
    """Let the answer that is being made, if any, say this once."""
    noted = _NOTED.get()
    if noted is not None and what not in noted:
        noted.append(what)
