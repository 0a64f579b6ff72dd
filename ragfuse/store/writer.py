"""Saving in the background: one thread, a bounded queue, never in an answer's way.

What a job does is its own business: nothing here knows chunks or tiers.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

log = logging.getLogger("ragfuse.store")

_EXIT_FLUSH_S = 5.0


class Writer:
    """Runs jobs in order. With `limit` of them waiting, further ones are dropped and counted.

    The thread starts with the first job and does not keep the interpreter alive; at exit it gets a few seconds.
    Ctrl-C reaches the main thread only, so a job under way is finished.
    """

    def __init__(self, limit: int = 64) -> None:
        self.dropped = 0
        self.failed = 0
        self._limit = limit
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._busy = self._closed = False

    def submit(self, job: Callable[[], object]) -> bool:
        """Run `job` later; False at once if it is dropped. Never waits for a job."""
        with self._changed:
            if self._closed or len(self._jobs) >= self._limit or not self._started():
                self.dropped += 1
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every job submitted so far is done; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, and wait for those taken; False if that took too long, and the rest is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        done = self.flush(timeout_s)
        with self._changed:
            self.dropped += len(self._jobs)
            self._jobs.clear()
        if done and self._thread is not None:
            self._thread.join(timeout_s)
        return done

    def _started(self) -> bool:
        if self._thread is None:
            thread = Thread(target=self._run, name="ragfuse-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is going down
                return False
            self._thread = thread
            atexit.register(_at_exit, weakref.ref(self))
        return True

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:
                self.failed += 1
                log.exception("A chunk could not be saved")
            finally:
                del job  # its bytes
                self._finished()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._busy = bool(self._jobs)
            return self._jobs.popleft() if self._jobs else None

    def _finished(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()


def _at_exit(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is not None:
        writer.close(_EXIT_FLUSH_S)
