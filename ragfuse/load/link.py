"""The network or storage link to a tier, which all its streams share: their number and its last
throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

KNOWN_S = 10.0
"""Seconds for which a measured throughput is used. Then it counts as unknown, so that a slow link
is tried again.
"""


class Link:
    """The link to one tier. Threads may share it.

    Args:
        max_streams: Streams that may read at the same time (B in the CacheGen paper); others wait
            for their turn.
        clock: Returns the time in seconds.

    Attributes:
        slot: To be held while a stream reads.
    """

    def __init__(self, max_streams: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_streams, self._clock = max_streams, clock
        self._seen: tuple[float, float] | None = None
        self.slot = BoundedSemaphore(max_streams)
        self._streams, self._lock = 0, Lock()

    @property
    def throughput(self) -> float | None:
        """Bytes per second that all streams together got last; None if unknown or older than
        `KNOWN_S`.
        """
        seen = self._seen
        return seen[0] if seen is not None and self._clock() - seen[1] < KNOWN_S else None

    @property
    def sharing(self) -> int:
        """Streams under way (N_c in the CacheGen paper), at least 1: the caller's own."""
        return max(1, self._streams)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Count one more stream while the block runs."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1

    def record(self, nbytes: int, seconds: float) -> float:
        """Record that one stream read `nbytes` in `seconds`; return the link's throughput in bytes
        per second.

        It is the stream's own throughput times the number of streams that read at the same time.
        """
        with self._lock:
            carried = nbytes / max(seconds, 1e-9) * max(1, min(self._streams, self._max_streams))
            self._seen = carried, self._clock()
            return carried
