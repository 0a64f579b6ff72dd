"""What all streams over one line know of it together: how many they are, and how fast it was last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

from ragfuse.process.fork import ForkLock, at_fork

MAX_STREAMS = 4
"""Streams that read at the same time, at most (the paper's B)."""
KNOWN_S = 10.0
"""Seconds that a line is taken to carry what it carried: one that was slow is tried again some time."""


class Link:
    """The line to one tier. Threads share it. most: streams that read at the same time; others take turns."""

    def __init__(self, most: int = MAX_STREAMS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._seen: tuple[float, float] | None = None
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nothing is under way: as when it was made, but for what was seen."""
        self._streams, self._lock, self._turns = 0, Lock(), BoundedSemaphore(self._most)

    @property
    def throughput(self) -> float | None:
        """Bytes a second that it carried last, for all who used it together; None: not known, or long ago."""
        seen = self._seen
        return seen[0] if seen is not None and self._clock() - seen[1] < KNOWN_S else None

    @property
    def sharing(self) -> int:
        """Streams under way (the paper's N_c), at least one: whoever asks."""
        return max(1, self._streams)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """One stream more, as long as it is under way."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A piece is read, together with those of at most so many others."""
        with self._turns:
            yield

    def saw(self, nbytes: int, seconds: float) -> float:
        """One stream had so many bytes in so long; what the whole line carried then, bytes a second."""
        with self._lock:
            carried = nbytes / max(seconds, 1e-9) * max(1, min(self._streams, self._most))
            self._seen = carried, self._clock()
            return carried


class Links:
    """The links of a store's tiers by name, each made when it is first asked for."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._most, self._lock, self._links = most, ForkLock(), dict[str, Link]()

    def of(self, tier: str) -> Link:
        """The link that all streams from this tier share."""
        with self._lock:
            return self._links.setdefault(tier, Link(self._most))

    def forget(self) -> None:
        """What was seen of lines is not known any more."""
        with self._lock:
            self._links = {}
