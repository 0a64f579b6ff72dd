"""What a whole process holds once: loaded models, engines of equal settings, and what went wrong beside the answer at
hand. The only such place in the house."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_LOCK = threading.RLock()
_HELD: dict[Hashable, Any] = {}
_NOTED: ContextVar[list[str] | None] = ContextVar("ragfuse_noted", default=None)


def shared(name: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave the first who asked for `name`; everybody after gets the same."""
    with _LOCK:
        if name not in _HELD:
            _HELD[name] = make()
        found: T = _HELD[name]
        return found


def forget(held: object) -> None:
    """Let go of what was given to all; the next who asks gets a new one."""
    with _LOCK:
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
