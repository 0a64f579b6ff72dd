"""A tier whose reads are slowed to a bandwidth: for seeing what slower devices would do.

Bytes, checks and counts are those of the disk tier it stands before; it adds only the waiting.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock

from torch import Tensor

from ragfuse.store import DiskTier, EntryMeta, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry


class ThrottledTier(Tier):
    """`disk` at `mbps` megabytes (10^6 bytes) a second; 0: as fast as it is.

    A read takes at least what its bytes take at that rate, reads of several threads together too:
    they share the line. slow: whether layers are read ahead by a thread (True), or where they are
    used (False): the two ways to compare.
    """

    def __init__(self, disk: DiskTier, mbps: float, *, slow: bool = True, name: str = "") -> None:
        super().__init__(name or disk.name, disk.capacity)
        self.counts, self.slow, self.mbps = disk.counts, slow, mbps
        self._disk, self._lock, self._free_at = disk, Lock(), 0.0

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return self._disk.nbytes

    def stat(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """The entries of the tier behind with these keys."""
        return {key: replace(entry, tier=self.name) for key, entry in self._disk.stat(keys).items()}

    def list(self) -> Sequence[Entry]:
        """The entries of the tier behind."""
        return [replace(entry, tier=self.name) for entry in self._disk.list()]

    def get(
        self, key: ChunkKey, layers: range, level: str | None = None
    ) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """The tier's own read, and the rest of the time that its bytes take on the line."""
        began = time.perf_counter()
        found = self._disk.get(key, layers, level)
        if found is not None and self.mbps:
            nbytes = sum(blob.numel() for blob in found[1:])
            with self._lock:
                self._free_at = max(self._free_at, began) + nbytes / (self.mbps * 1e6)
                until = self._free_at
            time.sleep(max(0.0, until - time.perf_counter()))
        return found

    def put(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """The tier's own write, not slowed."""
        return self._disk.put(key, meta, blobs)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Drop entries of the tier behind."""
        return self._disk.delete(keys)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Pin entries of the tier behind."""
        self._disk.pin(keys, pinned)
