"""What a tier writes down of its own accord, later and in the background. What that is, and how, it is told."""

from __future__ import annotations

from collections.abc import Callable

from ragfuse.process.fork import at_fork
from ragfuse.process.worker import Worker
from ragfuse.types.keys import ChunkKey


class Notes:
    """Hands keys to `write`, many at once, on a thread that lives while some wait. `write` raises nothing."""

    def __init__(self, write: Callable[[list[ChunkKey]], object]) -> None:
        self._worker = Worker("notes", self._take, write)
        self.renew()
        at_fork(self)

    def renew(self) -> None:
        """Nothing waits."""
        self._waiting: dict[ChunkKey, None] = {}

    def add(self, key: ChunkKey) -> None:
        """Write this key too, soon; where no thread can be started, with the next one."""
        with self._worker.changed:
            self._waiting[key] = None
            self._worker.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all are written, or `timeout_s` have passed."""
        if self._worker.is_running:
            self._worker.flush(timeout_s)

    def _take(self) -> list[ChunkKey] | None:
        waiting, self._waiting = self._waiting, {}
        return list(waiting) or None
