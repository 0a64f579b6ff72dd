"""A circuit breaker: a medium that is down costs one failed call instead of one per chunk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

log = logging.getLogger("ragfuse.store")


class Breaker:
    """A circuit breaker that opens at the first failed call.

    It then lets no call through for `cool_down_s` seconds, and after that one at a time until one
    succeeds. Every call that `enter` lets through ends in `failed` or `succeeded`. The log gets the
    first failure and the recovery.

    Args:
        name: What the log calls the medium.
        cool_down_s: Seconds without a call after a failure.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, name: str, cool_down_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._cool_down_s, self._clock = name, cool_down_s, clock
        self._lock, self._again_at = Lock(), 0.0
        self.is_open = False

    def enter(self) -> bool:
        """Return whether a call may be made now."""
        with self._lock:
            now = self._clock()
            if self.is_open and now < self._again_at:
                return False
            self._again_at = now + self._cool_down_s  # while open, the others wait for this one
            return True

    def failed(self, doing: str, error: Exception) -> None:
        """Record that a call failed; `doing` says in the log what could not be done."""
        with self._lock:
            was_open, self.is_open = self.is_open, True
            self._again_at = self._clock() + self._cool_down_s
        if not was_open:
            why = f"{type(error).__name__}: {error}"[:300]
            message = (
                "%s could not %s (%s). ragfuse goes on without it and tries it again every %g s"
            )
            log.warning(message, self.name, doing, why, self._cool_down_s)

    def succeeded(self) -> None:
        """Record that a call succeeded."""
        with self._lock:
            was_open, self.is_open = self.is_open, False
        if was_open:
            log.info("%s answers again and is in use", self.name)
