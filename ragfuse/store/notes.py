"""A background queue of keys that a tier still has to record something about."""

from __future__ import annotations

from collections.abc import Callable

from ragfuse.process.worker import Worker
from ragfuse.types.keys import ChunkKey


class Notes:
    """A queue of keys, passed on in batches by a background thread that lives while keys wait.

    Args:
        write: Called with a batch of keys. It must not raise.
    """

    def __init__(self, write: Callable[[list[ChunkKey]], object]) -> None:
        self._worker = Worker("notes", self._take, write)
        self._waiting: dict[ChunkKey, None] = {}

    def add(self, key: ChunkKey) -> None:
        """Queue a key. If no thread can be started, it is written with the next key that starts one."""
        with self._worker.changed:
            self._waiting[key] = None
            self._worker.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all keys are written, or `timeout_s` seconds have passed."""
        if self._worker.is_running:
            self._worker.flush(timeout_s)

    def _take(self) -> list[ChunkKey] | None:
        waiting, self._waiting = self._waiting, {}
        return list(waiting) or None
