"""A circuit breaker: a medium that is down costs one failed call instead of one per chunk.

Existing circuit breaker libraries hold a lock while a call runs, which would serialise the reads of all threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

log = logging.getLogger("ragfuse.store")


class BreakerOpen(Exception):
    """The call was not made: the medium failed a moment ago."""


class Breaker:
    """A circuit breaker that opens at the first failed call.

    It then lets no call through for `cool_down_s` seconds, and after that one at a time until one succeeds. Guard
    exactly one call of the medium: a block without a call would count as a success, and one with many calls, such as a
    listing of many pages, would keep other threads waiting.

    Args:
        name: What the log calls the medium. The log gets the first failure and the recovery.
        down_errors: Exceptions that mean that the medium is down; any other exception counts as a success.
        cool_down_s: Seconds without a call after a failure.
        error_text: Turns an exception into text for the log.
        clock: Returns the time in seconds.

    Attributes:
        attempts: Calls that were let through.
    """

    def __init__(
        self,
        name: str,
        down_errors: tuple[type[Exception], ...] = (OSError,),
        *,
        cool_down_s: float = 10.0,
        error_text: Callable[[Exception], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.attempts = name, 0
        self._down_errors, self._cool_down_s, self._clock = down_errors, cool_down_s, clock
        self._error_text = error_text
        self._opened_at: float | None = None
        self._lock, self._trying = Lock(), False

    @property
    def is_open(self) -> bool:
        """Whether the medium failed and no call has succeeded since."""
        return self._opened_at is not None

    def check(self) -> None:
        """Raise BreakerOpen if no call is let through now. For operations that may not reach the medium at all."""
        with self._lock:
            self._refuse()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run the block as one call; its exceptions are passed on.

        Raises:
            BreakerOpen: No call is let through now; the block does not run.
        """
        trial = self._enter()
        try:
            yield
        except self._down_errors as error:
            self._failed(trial, error)
            raise
        except Exception:
            self._succeeded(trial)
            raise
        except BaseException:  # Ctrl-C says nothing of the medium
            self._trying = self._trying and not trial
            raise
        self._succeeded(trial)

    def _enter(self) -> bool:
        """Let a call through, and return whether it is the trial of an open circuit."""
        with self._lock:
            self._refuse()
            trial = self._opened_at is not None
            self._trying = self._trying or trial
            self.attempts += 1
            return trial

    def _refuse(self) -> None:
        if self._opened_at is not None and (self._trying or self._clock() - self._opened_at < self._cool_down_s):
            raise BreakerOpen(self.name)

    def _failed(self, trial: bool, error: Exception) -> None:
        with self._lock:
            first = self._opened_at is None
            if first or trial:  # calls begun before the first failure do not prolong the cool-down
                self._opened_at = self._clock()
            self._trying = self._trying and not trial
        if first:
            what = (self.name, type(error).__name__, self._error_text(error), self._cool_down_s)
            log.warning("%s cannot be used (%s: %s). ragfuse goes on without it and tries it again every %g s", *what)

    def _succeeded(self, trial: bool) -> None:
        with self._lock:
            if trial:
                self._opened_at, self._trying = None, False
        if trial:
            log.info("%s answers again and is in use", self.name)
