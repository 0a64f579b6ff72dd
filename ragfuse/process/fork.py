"""Locks, threads and connections in a process that is forked: who has some begins anew in the child.

Of a process with threads, a fork copies the memory and one thread. A lock that another thread held stays held for ever
in the child, what waits for a thread waits for ever, and two processes write into one connection. So everything that
owns one of these says so here, once, with `at_fork`; what was queued in the parent stays the parent's.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from types import TracebackType
from typing import Protocol, runtime_checkable

log = logging.getLogger("ragfuse")


class Renews(Protocol):
    """What owns locks, threads or connections."""

    def renew(self) -> None:
        """Begin anew in a forked child, which has no other thread: with locks that are free, nothing queued, no thread
        started and no connection of the parent's."""
        ...


@runtime_checkable
class Pauses(Protocol):
    """What an owner may have beside `renew`, where a fork has to find it at rest: connections are closed."""

    def pause(self) -> None:
        """The process is about to be forked by this thread."""
        ...

    def resume(self) -> None:
        """It was, and this is the parent."""
        ...


_OWNERS: dict[int, weakref.ref[Renews]] = {}
_NUMBERS = count()
_FIRST = 1 << 60
_PAUSED: list[Pauses] = []
_TURN = threading.Lock()
"""Held by the thread that forks: others that want to, wait."""


def at_fork(owner: Renews, first: bool = False) -> None:
    """Let `owner.renew` be called in every forked child, as long as somebody holds the owner.

    first: it is paused before others, as its threads may wait for theirs.
    """
    number = next(_NUMBERS) + (_FIRST if first else 0)
    _OWNERS[number] = weakref.ref(owner, lambda _: _OWNERS.pop(number, None))


class ForkLock:
    """A lock that is free in a forked child, whoever held it in the parent. Used as `threading.Lock` is.

    torn: called in the child where another thread held it at the fork, so that what it guards may be half changed.
    """

    def __init__(self, torn: Callable[[], object] | None = None) -> None:
        self._lock, self._torn = threading.Lock(), torn
        at_fork(self)

    def renew(self) -> None:
        """As any owner."""
        held, self._lock = self._lock.locked(), threading.Lock()
        if held and self._torn is not None:
            self._torn()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Whether it is the caller's now."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Let go of it."""
        self._lock.release()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def is_torn(condition: threading.Condition) -> bool:
    """Whether another thread held a condition when this child was forked; it is left as it is."""
    if not condition.acquire(blocking=False):
        return True
    condition.release()
    return False


def _owners() -> Iterator[Renews]:
    """All that are still there, the youngest first: an index asks the catalog, which is older."""
    for number in sorted(_OWNERS, reverse=True):
        reference = _OWNERS.get(number)
        owner = reference() if reference is not None else None
        if owner is not None:
            yield owner


def _before() -> None:
    _TURN.acquire()
    for owner in _owners():
        if isinstance(owner, Pauses):
            _PAUSED.append(owner)
            _carefully(owner.pause)


def _in_parent() -> None:
    while _PAUSED:
        _carefully(_PAUSED.pop().resume)
    _TURN.release()


def _in_child() -> None:
    _PAUSED.clear()
    _TURN.release()
    for owner in _owners():
        _carefully(owner.renew)


def _carefully(do: Callable[[], object]) -> None:
    """One owner's trouble is no other's: a fork goes on whatever is raised."""
    try:
        do()
    except Exception:
        log.warning("Something was not ready for a fork", exc_info=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
