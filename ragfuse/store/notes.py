"""What a tier writes down of its own accord, later and in the background. What that is, and how, it is told."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread

from ragfuse.process.fork import at_fork
from ragfuse.types.keys import ChunkKey


class Notes:
    """Hands keys to `write`, many at once, on a thread that lives while some wait. `write` raises nothing."""

    def __init__(self, write: Callable[[list[ChunkKey]], object]) -> None:
        self._write = write
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nothing waits."""
        self._lock = Lock()
        self._waiting: dict[ChunkKey, None] = {}
        self._thread: Thread | None = None

    def add(self, key: ChunkKey) -> None:
        """Write this one too, soon."""
        with self._lock:
            self._waiting[key] = None
            if self._thread is None:
                self._thread = self._started()

    def _started(self) -> Thread | None:
        """A thread that writes; None where there is none to be had now: the next note tries again."""
        thread = Thread(target=self._run, name="ragfuse-notes", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread

    def wait(self, timeout_s: float) -> None:
        """Until all are written, or it takes too long."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while waiting := self._take():
            self._write(list(waiting))

    def _take(self) -> dict[ChunkKey, None]:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            if not waiting:
                self._thread = None
            return waiting
