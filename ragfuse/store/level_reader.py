"""Read layers of an entry from a tier at one codec level, and decode them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ragfuse.codec import LayerMeta, OtherTables
from ragfuse.process.lru import LRU
from ragfuse.store.levels import TierLevels
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry, LayerKV

log = logging.getLogger("ragfuse.store")

_REMEMBERED = 8192


@dataclass(frozen=True)
class EncodedLayers:
    """Consecutive layers of a chunk at one level, read but not decoded yet.

    Args:
        meta: The description of the whole chunk at that level.
        first: Index of the first layer.
        blobs: The encoded layers, uint8 `[nbytes]` each.
        decode: Decodes layers, given their bytes and descriptions.
        on_error: Called with the layer and the error when a layer cannot be decoded.
        is_best: Whether the entry has no less lossy level that can be decoded here.
    """

    meta: EntryMeta
    first: int
    blobs: Sequence[Tensor]
    decode: Callable[[Sequence[Tensor], Sequence[LayerMeta]], Sequence[LayerKV]]
    on_error: Callable[[int, ValueError], None]
    is_best: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded layers."""
        return sum(blob.numel() for blob in self.blobs)

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(self.first, self.first + len(self.blobs))

    def layer(self, at: int) -> LayerKV:
        """Decode the layer with index `at`, on the calling thread; raise ValueError if its bytes cannot be decoded."""
        try:
            return self.decode([self.blobs[at - self.first]], [self.meta.layers[at]])[0]
        except ValueError as error:
            self.on_error(at, error)
            raise


class LevelReader:
    """A reader of entries at one codec level. An entry that cannot be read is counted and logged; nothing is raised."""

    def __init__(self, levels: TierLevels) -> None:
        self._levels = levels
        self._unread = LRU[ChunkKey, str](_REMEMBERED)

    def readable(self, entries: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, Entry]:
        """Return the entries that can be decoded here, each with only the levels that can (see `why_not`)."""
        found = {}
        for key, entry in entries.items():
            levels = self._levels.readable(key, entry.sizes)
            if levels:
                found[key] = replace(entry, sizes={level: entry.sizes[level] for level in levels})
            else:
                self._unread.add(key, self._levels.why_not(key, entry.sizes))
        return found

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget the reasons that `why_not` gives for these keys, as they are looked up again."""
        if len(self._unread):
            self._unread.discard(keys)

    def why_not(self, key: ChunkKey) -> str:
        """Return why `readable` left out an entry, if that is remembered; else ""."""
        return self._unread.get(key) or ""

    def layers(
        self, tier: Tier, key: ChunkKey, layers: range, level: str | None
    ) -> tuple[Sequence[LayerKV], EncodedLayers] | None:
        """Read and decode some layers at a level (None: the first that can be decoded here).

        Returns:
            The layers, decoded and as they were read; None if the tier lacks them at that level, or they are damaged.
        """
        encoded = self.encoded(tier, key, layers, level)
        if encoded is None:
            return None
        try:
            return encoded.decode(encoded.blobs, encoded.meta.layers[layers.start : layers.stop]), encoded
        except ValueError as error:
            encoded.on_error(layers.start, error)
            return None

    def encoded(self, tier: Tier, key: ChunkKey, layers: range, level: str | None) -> EncodedLayers | None:
        """Read some layers as `layers` does, without decoding them."""
        found = tier.get(key, layers, level)
        if found is None:
            return None
        meta, *blobs = found
        is_readable = self._levels.readable(key, [level or meta.levels[0]])
        if not is_readable and level is None:
            best = next(iter(self._levels.readable(key, meta.levels)), None)
            return self.encoded(tier, key, layers, best) if best is not None else None
        if not is_readable:
            return None
        level = level or meta.levels[0]
        decode = partial(self._levels.decoded, key, level)
        on_error = partial(self._handle_undecodable, tier, key, level)
        is_best = self._levels.readable(key, meta.levels)[0] == level
        return EncodedLayers(meta.only(level), layers.start, blobs, decode, on_error, is_best)

    def _handle_undecodable(self, tier: Tier, key: ChunkKey, level: str, layer: int, error: ValueError) -> None:
        """Drop an entry that cannot be decoded; leave it alone if it was encoded with other tables."""
        if isinstance(error, OtherTables):
            self._levels.mark_undecodable(key, level, str(error))
            return
        tier.counts.add("corrupt")
        message = "Deleted the damaged entry %s from tier %s: it cannot be decoded from layer %d onwards: %s"
        log.warning(message, key, tier.name, layer, error)
        tier.delete([key])
