"""KV that waits in memory until it is saved in the background: of conversations and of the prefix cache."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable

from ragfuse.store.writer import Writer


class PendingSaves:
    """One background thread that saves, with a bound on the bytes that wait. Thread-safe.

    Args:
        max_jobs: Most saves that wait.
        max_nbytes: Most bytes that wait, unless it is one save; what exceeds either is not saved.
    """

    def __init__(self, max_jobs: int, max_nbytes: int) -> None:
        self._writer, self._max_nbytes, self._nbytes = Writer(max_jobs, "kv"), max_nbytes, 0
        self._changed = threading.Condition()
        self._waiting = Counter[Hashable]()

    def submit(self, names: Collection[Hashable], nbytes: int, save: Callable[[], object]) -> None:
        """Save in the background, unless too much waits already.

        Args:
            names: What `wait` waits for: keys of entries, names of conversations.
            nbytes: Bytes that stay in memory until then.
            save: Saves.
        """
        with self._changed:
            if self._nbytes and self._nbytes + nbytes > self._max_nbytes:
                return
            self._nbytes += nbytes
            self._waiting.update(names)

        def done() -> None:
            with self._changed:
                self._nbytes -= nbytes
                self._waiting -= Counter(names)
                self._changed.notify_all()

        def job() -> None:
            try:
                save()
            finally:
                done()

        if not self._writer.submit(job):
            done()

    def later(self, job: Callable[[], object]) -> None:
        """Run a job after all pending saves; no bound applies."""
        self._writer.submit(job, counts=False, is_awaited=True)

    def among(self, names: Collection[Hashable]) -> set[Hashable]:
        """Return those of these names that wait to be saved."""
        with self._changed:
            return {name for name in names if name in self._waiting}

    def wait(self, names: Collection[Hashable], timeout_s: float) -> None:
        """Wait until all saves under these names are done, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self.among(names), timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all is saved; return False if that takes longer than `timeout_s` seconds."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more saves, and make the pending ones, as many as `timeout_s` seconds allow."""
        self._writer.close(timeout_s)
