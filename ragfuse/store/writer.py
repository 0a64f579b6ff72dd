"""Background writing: a thread with a bounded queue of jobs, so that no answer waits for a save."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from ragfuse.process.worker import Worker, close_at_exit

log = logging.getLogger("ragfuse.store")

Job = Callable[[], object]


class Writer:
    """A thread that runs jobs in order.

    The thread starts with the first job and does not keep the interpreter alive; at its exit, queued jobs get a few
    seconds. Ctrl-C interrupts only the main thread, so a running job is finished.

    Args:
        limit: Jobs that may wait; further ones are dropped and counted.
        name: The thread's name is `ragfuse-` and this.

    Attributes:
        dropped: Counted jobs that were dropped, or that raised an exception.
    """

    def __init__(self, limit: int = 64, name: str = "writer") -> None:
        self.dropped, self._limit, self._closed = 0, limit, False
        self._worker = Worker(name, self._take, self._run)
        self._jobs: deque[Job] = deque()
        self._submitted = self._ended = 0
        close_at_exit(self)

    def submit(self, job: Job, *, counts: bool = True, is_awaited: bool = False) -> bool:
        """Queue a job. Never waits.

        Args:
            job: What to run.
            counts: Whether `dropped` counts it if it is dropped.
            is_awaited: Whether the caller waits for it. The limit does not apply then: there cannot be more such jobs
                than waiting threads.

        Returns:
            Whether it was queued; False if it was dropped.
        """
        with self._worker.changed:
            full = len(self._jobs) >= self._limit and not is_awaited
            if self._closed or full or not self._worker.start():
                self.dropped += counts
                return False
            self._jobs.append(job)
            self._submitted += 1
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every job submitted before now is done; return False if `timeout_s` ran out (None: no limit)."""
        with self._worker.changed:
            submitted = self._submitted
            return self._worker.changed.wait_for(lambda: self._ended >= submitted, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs and finish those queued; if `timeout_s` runs out, drop the rest and return False."""
        with self._worker.changed:
            self._closed = True
        done = self.flush(timeout_s)
        with self._worker.changed:
            self.dropped += len(self._jobs)
            self._ended += len(self._jobs)
            self._jobs.clear()
        return done and self._worker.flush(timeout_s)

    def _take(self) -> Job | None:
        return self._jobs.popleft() if self._jobs else None

    def _run(self, job: Job) -> None:
        try:
            job()
        except Exception:
            self.dropped += 1
            log.exception("A chunk could not be saved for reuse; answers are not affected")
        finally:
            with self._worker.changed:
                self._ended += 1
                self._worker.changed.notify_all()


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Start a countdown, and return a function that gives the seconds left (at least 0; None for no limit)."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if end is None else max(0.0, end - time.monotonic())
