"""Background work in one daemon thread that lives only while there are jobs."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from threading import Condition, Thread
from typing import Generic, Protocol, TypeVar

from ragfuse.process.exit import start_thread
from ragfuse.process.openmp import release_pool

Job = TypeVar("Job")
EXIT_S = 5.0
"""Most seconds that an ending process spends on the waiting jobs of an owner that was not closed."""


class Worker(Generic[Job]):
    """Runs an owner's jobs one after another in a thread that ends when there are no more.

    The owner has the queue, guards it with `changed`, and calls `start` after adding a job. The thread ends when `take`
    returns None, so an idle owner has no thread.

    Args:
        name: The thread's name is `ragfuse-` followed by this.
        take: Returns the next job, or None if none waits. Called with `changed` held.
        run: Runs a job. Called without the lock; it must not raise.
    """

    def __init__(self, name: str, take: Callable[[], Job | None], run: Callable[[Job], object]) -> None:
        self._name, self._take, self._run_job = name, take, run
        self.changed = Condition()
        self._thread: Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None

    def start(self) -> bool:
        """Start the thread unless it runs; call this with `changed` held.

        Returns:
            False if no thread can be started, because the interpreter is ending or has too many threads.
        """
        if self._thread is None:
            try:
                self._thread = start_thread(self._name, self._run)
            except RuntimeError:
                return False
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all jobs are done; return False if that takes longer than `timeout_s` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._run_job(job)
            release_pool()
            del job  # frees its bytes before the next job is awaited

    def _next(self) -> Job | None:
        with self.changed:
            job = self._take()
            if job is None:
                self._thread = None
            self.changed.notify_all()
            return job


class Closes(Protocol):
    """An owner of background work."""

    def close(self, timeout_s: float | None = None) -> object:
        """Accept no more jobs, and wait at most `timeout_s` seconds for those that wait."""
        ...


def close_at_exit(owner: Closes, timeout_s: float = EXIT_S) -> None:
    """Close `owner` when this process ends, if it still exists; only a weak reference is kept."""
    atexit.register(_close, os.getpid(), weakref.ref(owner), timeout_s)


def _close(process: int, reference: weakref.ref[Closes], timeout_s: float) -> None:
    owner = reference()
    if owner is not None and process == os.getpid():  # else a fork of it ends
        owner.close(timeout_s)
