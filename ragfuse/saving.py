"""Chunks that a question met and the store lacked: encoded after the answer, in the background, for next time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("ragfuse.engine")

WAITING = 256
"""Runs that may wait to be encoded; more are left for their next question."""


@dataclass(frozen=True)
class Work:
    """A run to encode behind `prefix`, and where it came from."""

    tokens: tuple[int, ...]
    prefix: tuple[int, ...]
    source: str


class Saver:
    """One thread that encodes and saves, one run at a time, so that a question waits for one run at most."""

    def __init__(self, save: Callable[[Work], None]) -> None:
        self._save = save
        self._queue: queue.Queue[Work | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting: set[Work] = set()
        self.dropped = 0

    def submit(self, work: Work) -> None:
        """Encode it some time; the same run waits only once, and what does not fit is dropped and counted."""
        with self._lock:
            if work in self._waiting:
                return
            try:
                self._queue.put_nowait(work)
            except queue.Full:
                self.dropped += 1
                return
            self._waiting.add(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ragfuse-encode", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until nothing waits."""
        self._queue.join()

    def close(self) -> None:
        """Finish what waits and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._save(work)
            except Exception:
                log.exception("A chunk of %d tokens could not be encoded for next time.", len(work.tokens))
            finally:
                with self._lock:
                    self._waiting.discard(work)
                self._queue.task_done()
        self._queue.task_done()
