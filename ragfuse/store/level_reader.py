"""Read layers of an entry from a tier at one codec level, and decode them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ragfuse.codec import LayerMeta, OtherTables
from ragfuse.process.lru import LRU
from ragfuse.store.levels import LevelLayout, TierLevels
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry, LayerKV

log = logging.getLogger("ragfuse.store")

_TRIES = 3
_REMEMBERED = 8192


class ReadLayers(NamedTuple):
    """Layers that were read at one level.

    Args:
        layers: The decoded layers.
        meta: The description of all layers of the entry at this one level. None: the entry exists, but this level is
            missing or cannot be decoded on this machine.
        blobs: The encoded bytes of the layers, uint8 `[nbytes]` each.
    """

    layers: tuple[LayerKV, ...]
    meta: EntryMeta | None = None
    blobs: Sequence[Tensor] = ()


@dataclass(frozen=True)
class EncodedLayers:
    """Consecutive layers of a chunk at one level, read but not decoded yet.

    Args:
        meta: The description of the whole chunk at that level.
        first: Index of the first layer.
        blobs: The encoded layers, uint8 `[nbytes]` each.
        decode: Decodes layers, given their bytes and descriptions.
        on_error: Called with the layer and the error when a layer cannot be decoded.
    """

    meta: EntryMeta
    first: int
    blobs: Sequence[Tensor]
    decode: Callable[[Sequence[Tensor], Sequence[LayerMeta]], Sequence[LayerKV]]
    on_error: Callable[[int, ValueError], None]

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
        self._layouts = LRU[tuple[str, ChunkKey], LevelLayout](_REMEMBERED)
        self._unread = LRU[ChunkKey, str](_REMEMBERED)

    def readable(self, tier: str, entries: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, dict[str, int]]:
        """Find which levels of a tier's entries can be decoded here, and remember the layout of these entries.

        Returns:
            By key, the bytes of each such level; entries without one are left out (see `why_not`).
        """
        decodable = {key: self._levels.readable(key, entry.sizes) for key, entry in entries.items()}
        for key, entry in entries.items():
            if len(entry.sizes) > 1 or (tier, key) in self._layouts:  # else its only level begins at piece 0
                self._layouts.add((tier, key), LevelLayout(tuple(entry.sizes), entry.n_layers))
            if not decodable[key]:
                self._unread.add(key, self._levels.why_not(key, entry.sizes))
        return {
            key: {level: entries[key].sizes[level] for level in levels} for key, levels in decodable.items() if levels
        }

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget the reasons that `why_not` gives for these keys, as they are looked up again."""
        if len(self._unread):
            self._unread.discard(keys)

    def why_not(self, key: ChunkKey) -> str:
        """Return why `readable` left out an entry, if that is remembered; else ""."""
        return self._unread.get(key) or ""

    def begins(self, tier: str, keys: Iterable[ChunkKey], level: str | None) -> dict[int, list[ChunkKey]]:
        """Group keys by the index of the piece that the level begins with; 0 if an entry's layout is not known."""
        found: dict[int, list[ChunkKey]] = {}
        for key in keys:
            known = self._layouts.get((tier, key))
            best = self._levels.best(key, known.levels, level) if known is not None else None
            found.setdefault(known.first(best) if known is not None and best else 0, []).append(key)
        return found

    def layers(self, tier: Tier, key: ChunkKey, first: int, count: int, level: str | None) -> ReadLayers | None:
        """Read and decode `count` layers from `first` on.

        Args:
            tier: The tier to read from.
            key: The chunk.
            first: The first layer.
            count: How many layers.
            level: The codec level; None: the entry's first level that can be decoded here.

        Returns:
            The layers that were read; `layers` is empty if the entry does not have the level. None if reading or
            decoding failed.
        """
        try:
            found = self._read_bytes(tier, key, first, count, level)
            if found is None or found.meta is None:
                return found
            return self._decoded(tier, key, first, found.meta, found.blobs)
        except Exception:
            tier.counts.add("corrupt")
            log.exception("Could not read layer %d of %s from tier %s", first, key, tier.name)
            return None

    def encoded(self, tier: Tier, key: ChunkKey, first: int, count: int, level: str) -> EncodedLayers | None:
        """Read `count` layers from `first` on at one level without decoding them; None if they cannot be read."""
        found = self._read_bytes(tier, key, first, count, level)
        if found is None or found.meta is None or first + count > found.meta.n_layers:
            return None
        decode = partial(self._levels.decoded, key, level)
        return EncodedLayers(
            found.meta, first, found.blobs, decode, partial(self._handle_undecodable, tier, key, level)
        )

    def is_best(self, tier: str, key: ChunkKey, level: str) -> bool:
        """Return whether this is the least lossy level of an entry that can be decoded here."""
        known = self._layouts.get((tier, key))
        return known is None or self._levels.best(key, known.levels, None) == level

    def _read_bytes(self, tier: Tier, key: ChunkKey, first: int, count: int, level: str | None) -> ReadLayers | None:
        """Read the bytes without decoding: in one read if the entry's layout is known, else a first read finds it."""
        known = self._layouts.get((tier.name, key))
        for _ in range(_TRIES):
            chosen = self._level_to_read(key, known.levels, level) if known is not None else None
            if known is not None and chosen is None:
                return ReadLayers(())
            at = known.first(chosen) if known is not None and chosen else 0
            found = tier.read(key, at + first, count)
            if found is None and at == 0:
                return None
            if found is None:  # maybe rewritten with fewer levels: try without the known layout
                known = None
                continue
            meta, *blobs = found
            known = LevelLayout(meta.levels, meta.n_layers)
            if len(meta.levels) > 1 or (tier.name, key) in self._layouts:
                self._layouts.add((tier.name, key), known)
            chosen = self._level_to_read(key, meta.levels, level)
            if chosen is not None and known.first(chosen) == at:
                return ReadLayers((), meta.only(chosen), blobs)
        return None

    def _level_to_read(self, key: ChunkKey, levels: Sequence[str], level: str | None) -> str | None:
        """Return the level to read: `level`, or for None the first, of those that can be decoded; None if none can."""
        return next(iter(self._levels.readable(key, [each for each in levels if level in (None, each)])), None)

    def _decoded(
        self, tier: Tier, key: ChunkKey, first: int, meta: EntryMeta, blobs: Sequence[Tensor]
    ) -> ReadLayers | None:
        if first + len(blobs) > meta.n_layers:
            return None
        try:
            described = meta.layers[first : first + len(blobs)]
            return ReadLayers(tuple(self._levels.decoded(key, meta.levels[0], blobs, described)), meta, blobs)
        except ValueError as error:
            self._handle_undecodable(tier, key, meta.levels[0], first, error)
            return None

    def _handle_undecodable(self, tier: Tier, key: ChunkKey, level: str, layer: int, error: ValueError) -> None:
        """Drop an entry that cannot be decoded; leave it alone if it was encoded with other tables."""
        if isinstance(error, OtherTables):
            self._levels.mark_undecodable(key, level, str(error))
            return
        tier.counts.add("corrupt")
        log.warning(
            "Deleted the damaged entry %s from tier %s: it cannot be decoded from layer %d onwards: %s",
            key,
            tier.name,
            layer,
            error,
        )
        tier.delete([key])
