"""Background threads: a bounded job queue, orderly shutdown, and torch's compute threads.

At shutdown the interpreter stops a daemon thread when the thread next requests the GIL. If the
thread does so inside native code, such as a matrix product, the process aborts. So shutdown waits
for threads that compute.

torch's libgomp keeps a pool of compute threads for each thread that has computed. If all pools
together have more threads than there are CPUs, idle threads sleep between operations instead of
spinning. Generating a token then takes nearly twice as long. So a thread releases its pool when
another thread continues the computation.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from threading import Condition, Thread
from typing import Any

_SOFT = 1  # omp_pause_soft: keeps the value set by `omp_set_num_threads`


def release_pool() -> None:
    """Release the calling thread's pool of compute threads until that thread computes again."""
    if (libgomp := _libgomp()) is not None:
        libgomp.omp_pause_resource_all(_SOFT)


def use_threads(count: int) -> None:
    """Set the number of compute threads for operations of the calling thread only."""
    if (libgomp := _libgomp()) is not None:
        libgomp.omp_set_num_threads(count)


def _libgomp() -> ctypes.CDLL | None:
    """Return torch's libgomp, or None if torch has no libgomp of OpenMP 5 or later."""
    torch = sys.modules.get("torch")
    return _loaded(Path(str(torch.__file__)).parent) if torch is not None else None


@cache
def _loaded(folder: Path) -> ctypes.CDLL | None:
    files = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    libgomp = ctypes.CDLL(str(files[0])) if files else None
    return libgomp if hasattr(libgomp, "omp_pause_resource_all") else None


log = logging.getLogger("ragfuse")
EXITING = threading.Event()
"""Set when the process begins to shut down. Every answer then stops at its next token."""
AT_MOST_S = 120.0
"""Maximum seconds that shutdown waits for threads that compute."""
_SILENT_S = 2.0
"""Seconds of waiting after which shutdown logs that it waits for the model's current step."""


class _Working:
    """The threads that compute. `depths` maps thread ids to the nesting depth of `at_work`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.depths: dict[int, int] = {}

    def wait(self, timeout_s: float) -> bool:
        """Wait until no other thread computes; return False on timeout."""
        me = threading.get_ident()
        with self.changed:
            return self.changed.wait_for(lambda: not self.depths.keys() - {me}, timeout_s)


_WORKING = _Working()
# the parent's threads do not exist in a forked child
os.register_at_fork(after_in_child=lambda: _Working.__init__(_WORKING))


@contextmanager
def at_work() -> Iterator[None]:
    """Delay shutdown until this thread leaves the block.

    During shutdown, a daemon thread not started by ragfuse is blocked here forever, so that it does
    not use an incomplete answer. Any other thread that enters gets RuntimeError.
    """
    me = threading.get_ident()
    with _WORKING.changed:
        depth = _WORKING.depths.get(me, 0)
        is_late = EXITING.is_set() and not depth
        if not is_late:
            _WORKING.depths[me] = depth + 1
    if is_late:
        _stay()
        raise RuntimeError("Python is shutting down, so no new request is accepted.")
    try:
        yield
    finally:
        with _WORKING.changed:
            _WORKING.depths[me] = depth
            if not depth:
                del _WORKING.depths[me]
                _WORKING.changed.notify_all()
        if not depth and EXITING.is_set():
            _stay()


def _stay() -> None:
    """If the calling thread is a daemon thread that ragfuse did not start, block it, outside native
    code, until the process ends.
    """
    thread = threading.current_thread()
    if thread.daemon and not isinstance(thread, _OwnThread):
        threading.Event().wait()


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread called `ragfuse-NAME`, for which shutdown waits. Raise RuntimeError if
    the process is shutting down or has too many threads.
    """
    if EXITING.is_set():
        raise RuntimeError("Python is shutting down, so no new thread can be started.")
    thread = _OwnThread(target=target, args=args, name=f"ragfuse-{name}", daemon=True)
    thread.start()
    return thread


class _OwnThread(threading.Thread):
    """A thread started by ragfuse. At shutdown the thread is joined."""

    def run(self) -> None:
        with at_work():
            super().run()


def _wait() -> None:
    """Stop all answers and wait for threads that compute. Ctrl-C during the wait exits at once."""
    EXITING.set()
    began_s = time.monotonic()
    try:
        if not _WORKING.wait(_SILENT_S):
            log.info("The program ends once the model's current step is over.")
            _WORKING.wait(AT_MOST_S - (time.monotonic() - began_s))
        for thread in threading.enumerate():
            if isinstance(thread, _OwnThread):
                thread.join(1)  # the thread has left its `at_work` block
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


atexit.register(_wait)

EXIT_S = 5.0
"""Maximum seconds in which shutdown closes an object that the program did not close."""


@dataclass(frozen=True, eq=False)
class _Job:
    run: Callable[[], object]
    names: Collection[Hashable]
    nbytes: float
    done: Future[Any] = field(default_factory=Future)


class BackgroundJobs:
    """A job queue with one worker thread. The thread exists only while there are jobs.

    At shutdown, queued jobs have `EXIT_S` seconds to finish. Ctrl-C interrupts only the main
    thread, so a running job finishes.

    Args:
        name: The name of the thread, without the prefix `ragfuse-`.
        limit: Maximum number of queued jobs. Further jobs are dropped.
        max_nbytes: Maximum total bytes of queued and running jobs. A job that would exceed this
            total is dropped, unless there is no other job.
        finishes: True if `close` waits for the running job even after the timeout of `close`.
    """

    def __init__(
        self, name: str, limit: int = 64, max_nbytes: float = inf, finishes: bool = False
    ) -> None:
        self._name = name
        self._limit = limit
        self._max_nbytes = max_nbytes
        self._finishes = finishes
        self._changed = Condition()
        self._closed = False
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None
        self._thread: Thread | None = None
        close_at_exit(self)

    def submit(
        self,
        run: Callable[[], object],
        names: Collection[Hashable] = (),
        nbytes: float = 0,
        *,
        is_awaited: bool = False,
    ) -> Future[Any] | None:
        """Queue a job and return at once. `wait` and `cancel` find the job by `names`.

        Return the job's future, whose result is None if the job fails or is dropped later. Return
        None if the job is dropped at once. `nbytes` counts towards `max_nbytes`. If `is_awaited` is
        True, the queue's limits do not apply. Few jobs are awaited, because each blocks a thread.
        """
        with self._changed:
            held = sum(job.nbytes for job in self._jobs)
            is_full = len(self._waiting) >= self._limit or 0 < held > self._max_nbytes - nbytes
            if self._closed or (is_full and not is_awaited) or not self._start():
                return None
            self._waiting.append(job := _Job(run, names, nbytes))
            return job.done

    @property
    def names(self) -> set[Hashable]:
        """The names of all queued and running jobs."""
        with self._changed:
            return {name for job in self._jobs for name in job.names}

    def wait(self, names: Collection[Hashable], timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until no queued or running job has one of `names`."""
        with self._changed:
            self._changed.wait_for(lambda: self.names.isdisjoint(names), timeout_s)

    def cancel(self, is_meant: Callable[[Hashable], bool]) -> None:
        """Drop queued jobs with a name that `is_meant` accepts; wait until the running job ends."""
        with self._changed:
            self._drop(lambda job: any(map(is_meant, job.names)))
            current = self._current
            self._changed.wait_for(lambda: current is None or self._current is not current)

    def __len__(self) -> int:
        """Return the number of queued and running jobs."""
        with self._changed:
            return len(self._jobs)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done, at most `timeout_s` if given. Return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the queued jobs. On timeout, drop the jobs still queued and return False."""
        with self._changed:
            self._closed = True
        done = self.flush(timeout_s)
        with self._changed:
            self._drop(lambda job: True)
        return self.flush(None if self._finishes else timeout_s) and done

    def _drop(self, is_meant: Callable[[_Job], bool]) -> None:
        for job in filter(is_meant, list(self._waiting)):
            self._waiting.remove(job)
            job.done.set_result(None)

    @property
    def _jobs(self) -> list[_Job]:
        return [*self._waiting, *([self._current] if self._current is not None else ())]

    def _start(self) -> bool:
        """Start the thread; return False during shutdown or if there are too many threads."""
        if self._thread is None:
            try:
                self._thread = start_thread(self._name, self._run)
            except RuntimeError:
                return False
        return True

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.done.set_result(job.run())
            except Exception as error:
                job.done.set_result(None)
                log.warning(
                    "A background job (%s) failed; answers are not affected: %r", self._name, error
                )
                log.debug("Where it failed", exc_info=True)
            release_pool()
            del job  # frees the job's bytes before the next job starts

    def _next(self) -> _Job | None:
        with self._changed:
            self._current = self._waiting.popleft() if self._waiting else None
            if self._current is None:
                self._thread = None
            self._changed.notify_all()
            return self._current


def close_at_exit(owner: Any) -> None:
    """Call `owner.close(EXIT_S)` at shutdown, unless `owner` has been garbage collected."""
    atexit.register(_close, os.getpid(), weakref.ref(owner))


def _close(process: int, reference: weakref.ref[Any]) -> None:
    owner = reference()
    if owner is not None and process == os.getpid():  # not in a forked child
        owner.close(EXIT_S)


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function that returns the rest of `timeout_s` in seconds; None means no limit."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if end is None else max(0.0, end - time.monotonic())
