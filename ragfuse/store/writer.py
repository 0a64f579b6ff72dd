"""Saving in the background: a thread and a bounded queue for each tier, never in an answer's way.

What a job does is its own business: nothing here knows chunks, and of tiers only their names.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Thread

from ragfuse.process.fork import at_fork

log = logging.getLogger("ragfuse.store")

_EXIT_FLUSH_S = 5.0


class Writer:
    """Runs jobs in order. With `limit` of them waiting, further ones are dropped and counted.

    The thread starts with the first job and does not keep the interpreter alive. Ctrl-C reaches the main thread only,
    so a job under way is finished.
    """

    def __init__(self, limit: int = 64) -> None:
        self.dropped = 0
        self.failed = 0
        self._limit, self._closed = limit, False
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nothing is queued: jobs of a process that was forked are done by it."""
        self._jobs: deque[Callable[[], object]] = deque()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._taken = self._ended = 0

    def submit(self, job: Callable[[], object], *, counts: bool = True, is_awaited: bool = False) -> bool:
        """Run `job` later; False at once if it is dropped, and counted if it `counts`. Never waits for a job.

        No limit holds for one whose submitter waits for it: there are no more of these than threads that wait.
        """
        with self._changed:
            full = len(self._jobs) >= self._limit and not is_awaited
            if self._closed or full or not self._started():
                self.dropped += counts
                return False
            self._jobs.append(job)
            self._taken += 1
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every job submitted so far is done, not for those to come; False if that took too long."""
        with self._changed:
            so_far = self._taken
            return self._changed.wait_for(lambda: self._ended >= so_far, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, and wait for those taken; False if that took too long, and the rest is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        done = self.flush(timeout_s)
        with self._changed:
            self.dropped += len(self._jobs)
            self._ended += len(self._jobs)
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
            return self._jobs.popleft() if self._jobs else None

    def _finished(self) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


class Writers:
    """A writer for each name, so that a tier that is slow, or hangs, holds up no other.

    At exit they get a few seconds, together.
    """

    def __init__(self, names: Iterable[str], limit: int = 64) -> None:
        self._each = {name: Writer(limit) for name in names}
        atexit.register(_at_exit, weakref.ref(self))

    @property
    def dropped(self) -> int:
        """Jobs that counted and were dropped."""
        return sum(writer.dropped for writer in self._each.values())

    @property
    def failed(self) -> int:
        """Jobs that raised."""
        return sum(writer.failed for writer in self._each.values())

    def submit(self, name: str, job: Callable[[], object], *, counts: bool = True, is_awaited: bool = False) -> bool:
        """Run `job` later, behind those of the same name; False at once if it is dropped, and counted if so."""
        return self._each[name].submit(job, counts=counts, is_awaited=is_awaited)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every job submitted so far is done; False if that took too long, all together."""
        left = countdown(timeout_s)
        done = [writer.flush(left()) for writer in self._each.values()]
        return all(done)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, and wait for those taken; False if that took too long, and the rest is dropped."""
        left = countdown(timeout_s)
        done = [writer.close(left()) for writer in self._each.values()]
        return all(done)


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """What is left of a time from now on, None for ever."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if end is None else max(0.0, end - time.monotonic())


def _at_exit(reference: weakref.ref[Writers]) -> None:
    writers = reference()
    if writers is not None:
        writers.close(_EXIT_FLUSH_S)
