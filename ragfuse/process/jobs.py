"""Background threads: a bounded queue of jobs, the end of the process, which waits for threads that
compute, and torch's pool of threads.

An ending interpreter stops its daemon threads where they next ask for it; one that is inside native
code then, such as a product of matrices, aborts the whole process. So the end waits for them.

torch's libgomp keeps a pool of threads for each thread that has computed. While all pools together
have more threads than there are CPUs, idle ones sleep between operations instead of spinning, and a
token takes nearly twice as long. So a thread that leaves computing to another releases its pool.
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

_SOFT = 1  # omp_pause_soft: what `omp_set_num_threads` has set stays


def release_pool() -> None:
    """Release this thread's pool of compute threads until it computes again."""
    if (libgomp := _libgomp()) is not None:
        libgomp.omp_pause_resource_all(_SOFT)


def use_threads(count: int) -> None:
    """Set by how many threads operations of this thread, and no other, are computed."""
    if (libgomp := _libgomp()) is not None:
        libgomp.omp_set_num_threads(count)


def _libgomp() -> ctypes.CDLL | None:
    """Return torch's libgomp; None where there is none, or one older than OpenMP 5."""
    torch = sys.modules.get("torch")
    return _loaded(Path(str(torch.__file__)).parent) if torch is not None else None


@cache
def _loaded(folder: Path) -> ctypes.CDLL | None:
    files = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    libgomp = ctypes.CDLL(str(files[0])) if files else None
    return libgomp if hasattr(libgomp, "omp_pause_resource_all") else None


log = logging.getLogger("ragfuse")
EXITING = threading.Event()
"""Set when the process ends; it ends every answer at the next token."""
AT_MOST_S = 120.0
"""Longest time in seconds that the end of the process is put off."""
_SILENT_S = 2.0
"""Time in seconds after which a line in the log says what is waited for."""


class _Working:
    """The threads that compute, and how deeply their `at_work` is nested."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.depths: dict[int, int] = {}

    def wait(self, timeout_s: float) -> bool:
        """Wait until no other thread computes; return False if `timeout_s` ran out."""
        me = threading.get_ident()
        with self.changed:
            return self.changed.wait_for(lambda: not self.depths.keys() - {me}, timeout_s)


_WORKING = _Working()
# the threads of a forked child's parent are not its own
os.register_at_fork(after_in_child=lambda: _Working.__init__(_WORKING))


@contextmanager
def at_work() -> Iterator[None]:
    """Let the end of the process wait until this thread leaves the block.

    After that, a caller's daemon thread stays here, so that it does not go on with an answer that
    was cut off; for another thread it is a RuntimeError.
    """
    me = threading.get_ident()
    with _WORKING.changed:
        depth = _WORKING.depths.get(me, 0)
        is_late = EXITING.is_set() and not depth
        if not is_late:
            _WORKING.depths[me] = depth + 1
    if is_late:
        _stay()
        raise RuntimeError("The interpreter is shutting down: no new request is computed.")
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
    """Keep a caller's daemon thread here, outside of native code, until the process is gone."""
    thread = threading.current_thread()
    if thread.daemon and not isinstance(thread, _OwnThread):
        threading.Event().wait()


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread `ragfuse-NAME` that the end of the process waits for; RuntimeError if
    the process is ending or has too many.
    """
    if EXITING.is_set():
        raise RuntimeError("The interpreter is shutting down: no thread is started.")
    thread = _OwnThread(target=target, args=args, name=f"ragfuse-{name}", daemon=True)
    thread.start()
    return thread


class _OwnThread(threading.Thread):
    """A thread of ragfuse's own, which ends at the end of its target."""

    def run(self) -> None:
        with at_work():
            super().run()


def _wait() -> None:
    """End all answers, and wait for threads that compute; a second Ctrl-C ends at once."""
    EXITING.set()
    began_s = time.monotonic()
    try:
        if not _WORKING.wait(_SILENT_S):
            log.info("The program ends once the model's current step is over.")
            _WORKING.wait(AT_MOST_S - (time.monotonic() - began_s))
        for thread in threading.enumerate():
            if isinstance(thread, _OwnThread):
                thread.join(1)  # its work is done
    except KeyboardInterrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


atexit.register(_wait)


log = logging.getLogger("ragfuse")

EXIT_S = 5.0
"""Most seconds that an ending process spends on the jobs of an owner that was not closed."""


@dataclass(frozen=True, eq=False)
class _Job:
    run: Callable[[], object]
    names: Collection[Hashable]
    nbytes: float
    done: Future[Any] = field(default_factory=Future)


class BackgroundJobs:
    """A thread that runs jobs in order. An idle queue has no thread.

    At the end of the process, queued jobs get a few seconds. Ctrl-C interrupts only the main
    thread, so a running job is finished.

    Args:
        name: The thread's name is `ragfuse-` and this.
        limit: Jobs that may wait; further ones are dropped.
        max_nbytes: Most bytes that all jobs hold, unless it is one job; what exceeds that is
            dropped.
        finishes: Whether `close` waits for the job at hand however long that takes.
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
        """Queue a job, which `wait` and `cancel` know by its names; never wait.

        Return its future, whose result is None if it fails or is dropped later; None if it is
        dropped at once. The limits do not apply to a job that is awaited: there are no more of
        these than threads that wait.
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
        """The names of all jobs that wait or run."""
        with self._changed:
            return {name for job in self._jobs for name in job.names}

    def wait(self, names: Collection[Hashable], timeout_s: float) -> None:
        """Wait until all jobs with these names are done, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.names.isdisjoint(names), timeout_s)

    def cancel(self, is_meant: Callable[[Hashable], bool]) -> None:
        """Drop waiting jobs with such a name, and wait for the job at hand to end."""
        with self._changed:
            self._drop(lambda job: any(map(is_meant, job.names)))
            current = self._current
            self._changed.wait_for(lambda: current is None or self._current is not current)

    def __len__(self) -> int:
        """Return the number of jobs that wait or run."""
        with self._changed:
            return len(self._jobs)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done; return False if `timeout_s` ran out (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the queued jobs; if `timeout_s` runs out, drop the rest and return False."""
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
        """Start the thread; return False if the process ends or has too many threads."""
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
            del job  # frees its bytes before the next job is awaited

    def _next(self) -> _Job | None:
        with self._changed:
            self._current = self._waiting.popleft() if self._waiting else None
            if self._current is None:
                self._thread = None
            self._changed.notify_all()
            return self._current


def close_at_exit(owner: Any) -> None:
    """Close an owner, weakly referenced, when this process ends, within `EXIT_S`."""
    atexit.register(_close, os.getpid(), weakref.ref(owner))


def _close(process: int, reference: weakref.ref[Any]) -> None:
    owner = reference()
    if owner is not None and process == os.getpid():  # else a fork of it ends
        owner.close(EXIT_S)


def countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function that gives the seconds left, at least 0; None for no limit."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    return lambda: None if end is None else max(0.0, end - time.monotonic())
