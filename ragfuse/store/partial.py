"""Chunks that are being read layer by layer, kept until they are whole and can be promoted. Bytes only, no tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from torch import Tensor

from ragfuse.store.tier import EntryMeta, Whole
from ragfuse.types.keys import ChunkKey


class PartialReads:
    """Layers of chunks read so far, each at one level, that together weigh at most `limit_nbytes` once whole.

    Not locked: its owner is.
    A chunk begins with its layer 0. With no room left, the one that waited longest for its next layer goes.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.epoch = 0
        self._limit, self._nbytes = limit_nbytes, 0
        self._chunks: OrderedDict[ChunkKey, tuple[EntryMeta, dict[int, Tensor]]] = OrderedDict()

    def keys(self) -> set[ChunkKey]:
        """Chunks that have begun."""
        return set(self._chunks)

    def add(self, key: ChunkKey, first: int, meta: EntryMeta, new: Sequence[Tensor], epoch: int) -> Whole | None:
        """Keep layers from `first` on; gives the chunk once it is whole. Layers of an older `epoch` are not kept."""
        if epoch != self.epoch or meta.nbytes > self._limit:
            return None
        if key not in self._chunks:
            if first != 0:
                return None
            self._chunks[key] = (meta, {})
            self._nbytes += meta.nbytes
        self._chunks.move_to_end(key)
        known, blobs = self._chunks[key]
        if known != meta:  # written anew meanwhile, or read at another level
            self._drop(key)
            return None
        blobs.update(enumerate(new, first))
        if len(blobs) == len(meta.layers):
            self._drop(key)
            return meta, tuple(blobs[i] for i in range(len(blobs)))
        while self._nbytes > self._limit:
            self._drop(next(iter(self._chunks)))
        return None

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        """Forget these chunks, and every layer that was read before now but not added yet."""
        self.epoch += 1
        for key in keys:
            self._drop(key)

    def _drop(self, key: ChunkKey) -> None:
        if key in self._chunks:
            self._nbytes -= self._chunks.pop(key)[0].nbytes
