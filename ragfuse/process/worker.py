"""Work in the background: one daemon thread that lives while there is something to do."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from threading import Condition, Thread
from typing import Generic, Protocol, TypeVar

from ragfuse.process.fork import at_fork

Job = TypeVar("Job")
EXIT_S = 5.0
"""Seconds that a process which ends without closing what works in the background spends on what still waits."""


class Worker(Generic[Job]):
    """Take jobs one after another and run them in a thread, as long as there are any.

    The owner keeps its own queue, guards it with `changed`, and calls `start` when a job was added. The thread ends
    when `take` has nothing more, so an idle owner holds no thread. In a forked child no thread runs: what was queued is
    done by the parent, and the owner empties its queue in its own `renew`.

    Args:
        name: The thread's name is `ragfuse-` and this.
        take: Return the next job, or None where nothing waits. Called with `changed` held.
        run: Do a job, without the lock. It must not raise.
    """

    def __init__(self, name: str, take: Callable[[], Job | None], run: Callable[[Job], object]) -> None:
        self._name, self._take, self._do = name, take, run
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Begin with a free lock and no thread."""
        self.changed = Condition()
        self._thread: Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread runs, or was started."""
        return self._thread is not None

    def start(self) -> bool:
        """Start the thread unless it runs; call this with `changed` held.

        Returns:
            False where no thread can be started, as the interpreter is ending or has too many.
        """
        if self._thread is None:
            thread = Thread(target=self._run, name=f"ragfuse-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits and the thread has ended its last job; False if that took longer."""
        with self.changed:
            return self.changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)
            del job  # its bytes

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
        """Take no more jobs, and wait for those taken, for `timeout_s` at most."""
        ...


def close_at_exit(owner: Closes, timeout_s: float = EXIT_S) -> None:
    """Close `owner` when the interpreter ends, if it is still there. No reference is held to it."""
    atexit.register(_close, weakref.ref(owner), timeout_s)


def _close(reference: weakref.ref[Closes], timeout_s: float) -> None:
    owner = reference()
    if owner is not None:
        owner.close(timeout_s)
