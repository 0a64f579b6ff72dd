"""Open chunk files between reads: opening one for every layer would cost more than reading it. No names, no rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ragfuse.process.fork import ForkLock
from ragfuse.store.chunkfile import ChunkFile
from ragfuse.types.keys import ChunkKey


class FileCache:
    """The files used last, open. A file that leaves is closed once its last reader is done."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, ForkLock()
        self._files: OrderedDict[ChunkKey, ChunkFile] = OrderedDict()

    def get(self, key: ChunkKey) -> ChunkFile | None:
        """The open file of `key`, if there is one."""
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def add(self, key: ChunkKey, file: ChunkFile) -> None:
        """Keep `file` open, letting go of the one used longest ago."""
        with self._lock:
            self._files[key] = file
            while len(self._files) > self._limit:
                self._files.popitem(last=False)

    def sweep(self) -> None:
        """Let go of deleted files, so that the medium gets their bytes back."""
        with self._lock:
            for key in [key for key, file in self._files.items() if file.is_unlinked]:
                del self._files[key]

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """Let go of these."""
        with self._lock:
            for key in keys:
                self._files.pop(key, None)

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._files.clear()
