"""Chunks that are being read layer by layer, collected until they are complete and can be promoted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachetools import LRUCache
from torch import Tensor

from ragfuse.store.tier import EntryMeta, Whole
from ragfuse.types.keys import ChunkKey

_Partial = tuple[EntryMeta, dict[int, Tensor]]


def _whole_nbytes(partial: _Partial) -> int:
    return partial[0].nbytes


class PartialReads:
    """The layers read so far of incomplete chunks, each chunk at one level. Not thread-safe: the owner holds a lock.

    Collecting a chunk begins with its layer 0. With no room left, the chunk that has waited longest for its next layer
    is dropped.

    Args:
        limit_nbytes: Most bytes that all collected chunks together would occupy once complete.

    Attributes:
        epoch: A number that changes with every `discard`.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.epoch = 0
        self._limit = limit_nbytes
        self._chunks: LRUCache[ChunkKey, _Partial] = LRUCache(limit_nbytes, getsizeof=_whole_nbytes)

    def keys(self) -> set[ChunkKey]:
        """Return the keys of the incomplete chunks."""
        return set(self._chunks)

    def add(self, key: ChunkKey, first: int, meta: EntryMeta, new: Sequence[Tensor], epoch: int) -> Whole | None:
        """Add layers from `first` on, and return the chunk once it is complete, else None.

        Layers of an older `epoch` are ignored: the chunk may have been deleted since they were read.
        """
        if epoch != self.epoch or meta.nbytes > self._limit:
            return None
        known, blobs = self._chunks.get(key) or (meta, {})
        if known != meta:  # rewritten meanwhile, or read at another level
            del self._chunks[key]
            return None
        if not blobs and first != 0:
            return None
        blobs.update(enumerate(new, first))
        if len(blobs) == len(meta.layers):
            self._chunks.pop(key, None)
            return meta, tuple(blobs[i] for i in range(len(blobs)))
        self._chunks[key] = (meta, blobs)
        return None

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """Drop these chunks, and start a new epoch: layers that were read before now but not added yet are ignored."""
        self.epoch += 1
        for key in keys:
            self._chunks.pop(key, None)
