"""A re-entrant lock that long and short steps take in turns.

A thread that releases an ordinary lock and takes it again at once, as decoding does between two
tokens, usually gets it before waiting threads do. Here each kind of step goes to the thread that
has waited longest, and after a long step the short ones that wait go first, each once. So a prefill
waits for at most one token of each answer that is being decoded and for the prefills before it, and
a token for at most one prefill, however many wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ragfuse.process.jobs import release_pool


class FairLock:
    """A fair re-entrant lock: `with lock` for long steps, `with lock.short()` for short ones."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._depth = 0
        self._mutex = threading.Lock()
        self._turns = {is_short: deque[tuple[int, threading.Lock]]() for is_short in (False, True)}
        # of the owner's step; short steps that go before the next long one
        self._is_short, self._n_first = False, 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return self._owner == threading.get_ident()

    @property
    def waiting(self) -> int:
        """Number of threads that wait for it."""
        with self._mutex:
            return sum(map(len, self._turns.values()))

    def acquire(self, is_short: bool = False) -> None:
        """Wait for the lock and take it.

        Args:
            is_short: Whether it is held for a short step, one token of answers for example.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None:
                self._owner, self._is_short = me, is_short
            if self._owner == me:
                self._depth += 1
                return
            turn = me, threading.Lock()
            turn[1].acquire()
            self._turns[is_short].append(turn)
        try:
            release_pool()
            turn[1].acquire()  # `_hand_on` releases it
        except BaseException:  # Ctrl-C
            with self._mutex:
                if turn in self._turns[is_short]:
                    self._turns[is_short].remove(turn)
                else:
                    self._hand_on()
            raise

    def release(self) -> None:
        """Release the lock once."""
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._hand_on()

    def _hand_on(self) -> None:
        """Give the lock to the thread that waited longest; after a long step each waiting short
        one goes first.
        """
        short, long = self._turns[True], self._turns[False]
        if not self._is_short:
            self._n_first = len(short)
        self._is_short = bool(short) and (self._n_first > 0 or not long)
        self._n_first -= self._is_short
        turns = short if self._is_short else long
        self._owner, gate = turns.popleft() if turns else (None, None)
        self._depth = int(gate is not None)
        if gate is not None:
            gate.release()

    def __enter__(self) -> None:
        self.acquire()

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
