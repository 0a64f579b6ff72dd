"""A re-entrant lock that long and short steps take in turns.

A thread that releases an ordinary lock and takes it again at once, as decoding does between two tokens, usually gets it
before waiting threads do. Here each kind of step goes to the thread that has waited longest, and after a long step the
short ones that wait go first, each once. So a prefill waits for at most one token of each answer that is being decoded
and for the prefills before it, and a token for at most one prefill, however many wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class _Turn:
    """A waiting thread; its gate opens when it owns the lock."""

    def __init__(self, thread: int, is_short: bool) -> None:
        self.thread, self.is_short, self.gate = thread, is_short, threading.Lock()
        self.gate.acquire()


class FairLock:
    """A fair re-entrant lock with the interface of `threading.RLock`, and a second kind of turns for short steps."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._depth = 0
        self._mutex = threading.Lock()
        self._waiting: deque[_Turn] = deque()
        self._waiting_short: deque[_Turn] = deque()
        self._is_short, self._n_first = False, 0  # of the owner's step; short steps that go before the next long one

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
            return len(self._waiting) + len(self._waiting_short)

    def acquire(self, blocking: bool = True, timeout: float = -1, is_short: bool = False) -> bool:
        """Acquire the lock and return whether this thread has it now.

        Args:
            blocking: False: do not wait.
            timeout: Seconds to wait at most; -1: without limit.
            is_short: Whether it is held for a short step, one token of answers for example.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None or self._owner == me:
                self._is_short = self._is_short if self._owner == me else is_short
                self._owner, self._depth = me, self._depth + 1
                return True
            if not blocking or timeout == 0:
                return False
            turn = _Turn(me, is_short)
            self._queue(turn).append(turn)
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
            if not self._is_short:
                self._n_first = len(self._waiting_short)
            if self._waiting_short and (self._n_first > 0 or not self._waiting):
                self._n_first -= 1
                self._hand_to(self._waiting_short.popleft())
            elif self._waiting:
                self._hand_to(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def short(self) -> Iterator[None]:
        """Hold the lock for a short step."""
        self.acquire(is_short=True)
        try:
            yield
        finally:
            self.release()

    def _queue(self, turn: _Turn) -> deque[_Turn]:
        return self._waiting_short if turn.is_short else self._waiting

    def _hand_to(self, turn: _Turn) -> None:
        self._owner, self._depth, self._is_short = turn.thread, 1, turn.is_short
        turn.gate.release()

    def _withdrawn(self, turn: _Turn) -> bool:
        """Stop waiting; return False if the lock was handed to this thread already."""
        with self._mutex:
            if turn not in self._queue(turn):
                return False
            self._queue(turn).remove(turn)
            return True
