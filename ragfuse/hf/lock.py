"""A re-entrant lock with FIFO fairness: it goes to the thread that has waited longest.

A thread that releases an ordinary lock and takes it again at once, as decoding does between two tokens, usually gets it
before waiting threads do. With this lock a prefill waits for at most one token of others, and they for one prefill.
"""

from __future__ import annotations

import threading
from collections import deque

from ragfuse.process.fork import at_fork


class _Turn:
    """A waiting thread; its gate opens when it owns the lock."""

    def __init__(self, thread: int) -> None:
        self.thread, self.gate = thread, threading.Lock()
        self.gate.acquire()


class FairLock:
    """A fair re-entrant lock with the interface of `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._depth = 0
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Reset the lock in a forked child: no thread waits for it, and only this thread may still hold it."""
        self._mutex = threading.Lock()
        self._waiting: deque[_Turn] = deque()
        if self._owner != threading.get_ident():
            self._owner, self._depth = None, 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    @property
    def is_anothers(self) -> bool:
        """Whether another thread holds it."""
        return self._owner not in (None, threading.get_ident())

    @property
    def waiting(self) -> int:
        """Number of threads that wait for it."""
        with self._mutex:
            return len(self._waiting)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock and return whether this thread has it now.

        Args:
            blocking: False: do not wait.
            timeout: Seconds to wait at most; -1: without limit.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None or self._owner == me:
                self._owner, self._depth = me, self._depth + 1
                return True
            if not blocking or timeout == 0:
                return False
            turn = _Turn(me)
            self._waiting.append(turn)
        try:
            came = turn.gate.acquire(timeout=timeout)
        except BaseException:  # Ctrl-C
            if not self._withdrawn(turn):
                self.release()
            raise
        return came or not self._withdrawn(turn)

    def release(self) -> None:
        """Release the lock once; RuntimeError if this thread does not hold it."""
        with self._mutex:
            if self._owner != threading.get_ident():
                raise RuntimeError("This thread does not hold the lock.")
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                turn = self._waiting.popleft()
                self._owner, self._depth = turn.thread, 1
                turn.gate.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _withdrawn(self, turn: _Turn) -> bool:
        """Stop waiting; return False if the lock was handed to this thread already."""
        with self._mutex:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True
