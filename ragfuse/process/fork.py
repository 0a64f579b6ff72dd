"""Fork safety: owners of locks, threads and connections register with `at_fork`, and start afresh in a forked child.

A fork copies the memory but only the calling thread. In the child, a lock that another thread held would stay locked
for ever, waiting for a thread would never end, and both processes would write to one connection. Work that was queued
in the parent stays with the parent.
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
    """An owner of locks, threads or connections."""

    def renew(self) -> None:
        """Start afresh in a forked child, which has only one thread.

        Afterwards all locks are free, nothing is queued, no thread is started and no connection of the parent is used.
        """
        ...


@runtime_checkable
class Pauses(Protocol):
    """Optional part of an owner that must be at rest during a fork, such as one with open connections."""

    def pause(self) -> None:
        """Come to rest: this thread is about to fork the process."""
        ...

    def resume(self) -> None:
        """Continue in the parent after the fork."""
        ...


_OWNERS: dict[int, weakref.ref[Renews]] = {}
_NUMBERS = count()
_FIRST_OFFSET = 1 << 60
_PAUSED: list[Pauses] = []
_FORK_LOCK = threading.Lock()
"""Held by the thread that forks, so that only one does at a time."""


def at_fork(owner: Renews, first: bool = False) -> None:
    """Register an owner, so that its `renew` is called in every forked child. Only a weak reference is kept.

    Args:
        owner: The owner; if it also has `pause` and `resume`, these are called around the fork in the parent.
        first: Whether to pause it before the others, because its threads may wait for theirs.
    """
    number = next(_NUMBERS) + (_FIRST_OFFSET if first else 0)
    _OWNERS[number] = weakref.ref(owner, lambda _: _OWNERS.pop(number, None))


class ForkLock:
    """A `threading.Lock` that is free in a forked child, whoever held it in the parent.

    Args:
        torn: Called in the child if the lock was held at the fork, as the data it guards may be half changed.
    """

    def __init__(self, torn: Callable[[], object] | None = None) -> None:
        self._lock, self._torn = threading.Lock(), torn
        at_fork(self)

    def renew(self) -> None:
        """Become free in a forked child, and call `torn` if the lock was held."""
        held, self._lock = self._lock.locked(), threading.Lock()
        if held and self._torn is not None:
            self._torn()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock, and return whether that worked (as `threading.Lock.acquire`)."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def locked(self) -> bool:
        """Return whether the lock is held."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def is_torn(condition: threading.Condition) -> bool:
    """Return whether another thread held a condition when this child was forked; the condition is left as it is."""
    if not condition.acquire(blocking=False):
        return True
    condition.release()
    return False


def _owners() -> Iterator[Renews]:
    """Yield all owners that still exist, youngest first, as an owner may use older ones (an index its catalog)."""
    for number in sorted(_OWNERS, reverse=True):
        reference = _OWNERS.get(number)
        owner = reference() if reference is not None else None
        if owner is not None:
            yield owner


def _before() -> None:
    _FORK_LOCK.acquire()
    for owner in _owners():
        if isinstance(owner, Pauses):
            _PAUSED.append(owner)
            _call_logged(owner.pause)


def _in_parent() -> None:
    while _PAUSED:
        _call_logged(_PAUSED.pop().resume)
    _FORK_LOCK.release()


def _in_child() -> None:
    _PAUSED.clear()
    _FORK_LOCK.release()
    for owner in _owners():
        _call_logged(owner.renew)


def _call_logged(callback: Callable[[], object]) -> None:
    """Call an owner's method and log any exception, so that the other owners are called too."""
    try:
        callback()
    except Exception:
        log.warning(
            "A part of ragfuse could not prepare for os.fork(). If the child process fails, start it by spawn instead",
            exc_info=True,
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
