"""A circuit breaker: a medium that is down costs one failed call, not one per chunk.

Nothing here knows what a call does. The breakers at hand hold their lock while a call runs, which would put the reads
of all threads in one line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from ragfuse.process.fork import at_fork

log = logging.getLogger("ragfuse.store")


class BreakerOpen(Exception):
    """The call was not made: the medium failed a moment ago."""


class Breaker:
    """Lets calls through until one fails, then none for `cool_down_s`, then one at a time until one is answered.

    A guarded block is one call of the medium, neither less (what was in memory says nothing of it) nor more (a listing
    of many pages would keep the others waiting).

    `trouble` are the exceptions that say the medium itself is down; any other is an answer. `name` is for the log,
    which hears of the first failure, as `said` puts it, and of the recovery. `attempts` counts calls let through.
    """

    def __init__(
        self,
        name: str,
        trouble: tuple[type[Exception], ...] = (OSError,),
        *,
        cool_down_s: float = 10.0,
        said: Callable[[Exception], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.attempts = name, 0
        self._trouble, self._cool_down_s, self._clock = trouble, cool_down_s, clock
        self._said = said
        self._opened_at: float | None = None
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """No call is under way; what was heard of the medium counts."""
        self._lock, self._trying = Lock(), False

    @property
    def is_open(self) -> bool:
        """Whether the last that was heard of the medium is a failure."""
        return self._opened_at is not None

    def check(self) -> None:
        """BreakerOpen if no call is let through now: for what may be done without asking, and so tells nothing."""
        with self._lock:
            self._refuse()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Runs the block, whose exceptions pass; BreakerOpen instead of it while no call is let through."""
        trial = self._enter()
        try:
            yield
        except self._trouble as error:
            self._failed(trial, error)
            raise
        except Exception:
            self._answered(trial)
            raise
        except BaseException:  # Ctrl-C says nothing of the medium
            self._trying = self._trying and not trial
            raise
        self._answered(trial)

    def _enter(self) -> bool:
        """Whether this call is the trial of an open circuit."""
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
            if first or trial:  # a call that was under way when another failed prolongs nothing
                self._opened_at = self._clock()
            self._trying = self._trying and not trial
        if first:
            what = (self.name, type(error).__name__, self._said(error), self._cool_down_s)
            log.warning("%s is left out, it cannot be used (%s: %s); it is tried again every %g s", *what)

    def _answered(self, trial: bool) -> None:
        with self._lock:
            if trial:
                self._opened_at, self._trying = None, False
        if trial:
            log.info("%s answers again", self.name)
