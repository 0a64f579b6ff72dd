"""Layers of one entry at one level, read from one tier where that level stands, and decoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ragfuse.codec import LayerMeta, OtherTables
from ragfuse.store.levels import LevelLayout, Recent, TierLevels
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry, LayerKV

log = logging.getLogger("ragfuse.store")

_TRIES = 3
_REMEMBERED = 8192


class ReadLayers(NamedTuple):
    """What was read: layers, the entry's description at their level alone, their bytes.

    No layers: the entry is there, and has no such level that could be decoded.
    """

    layers: tuple[LayerKV, ...]
    meta: EntryMeta | None = None
    blobs: Sequence[Tensor] = ()


@dataclass(frozen=True)
class EncodedLayers:
    """Layers of a chunk at one level as they were read, from `first` on and not decoded yet.

    meta: of the whole chunk at that level. `amiss` hears of a layer that cannot be decoded.
    """

    meta: EntryMeta
    first: int
    blobs: Sequence[Tensor]
    decode: Callable[[Sequence[Tensor], Sequence[LayerMeta]], Sequence[LayerKV]]
    amiss: Callable[[int, ValueError], None]

    @property
    def nbytes(self) -> int:
        """As read."""
        return sum(blob.numel() for blob in self.blobs)

    @property
    def layers(self) -> range:
        """Which they are."""
        return range(self.first, self.first + len(self.blobs))

    def layer(self, at: int) -> LayerKV:
        """One of these layers decoded, on whatever thread asks; ValueError where its bytes are none of this codec's."""
        try:
            return self.decode([self.blobs[at - self.first]], [self.meta.layers[at]])[0]
        except ValueError as error:
            self.amiss(at, error)
            raise


class LevelReader:
    """Reads levels of entries. What of an entry cannot be read is counted and logged, never raised."""

    def __init__(self, levels: TierLevels) -> None:
        self._levels = levels
        self._layouts = Recent[tuple[str, ChunkKey], LevelLayout](_REMEMBERED)
        self._unread = Recent[ChunkKey, str](_REMEMBERED)

    def readable(self, tier: str, entries: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, dict[str, int]]:
        """Sizes of the levels that can be decoded here, of entries that a tier told of; remembers where they stand."""
        told = {key: self._levels.readable(key, entry.sizes) for key, entry in entries.items()}
        for key, entry in entries.items():
            if len(entry.sizes) > 1 or (tier, key) in self._layouts:  # any other begins with its only level
                self._layouts.add((tier, key), LevelLayout(tuple(entry.sizes), entry.n_layers))
            if not told[key]:
                self._unread.add(key, self._levels.why_not(key, entry.sizes))
        return {key: {level: entries[key].sizes[level] for level in levels} for key, levels in told.items() if levels}

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """Forget why these were not told of: they are looked for anew."""
        for key in keys if len(self._unread) else ():
            self._unread.discard(key)

    def why_not(self, key: ChunkKey) -> str:
        """Why a key's entry was found and not told of, as far as is remembered; "" where none was."""
        return self._unread.get(key) or ""

    def begins(self, tier: str, keys: Iterable[ChunkKey], level: str | None) -> dict[int, list[ChunkKey]]:
        """The piece that the level begins with, and of which keys, as far as is known."""
        found: dict[int, list[ChunkKey]] = {}
        for key in keys:
            known = self._layouts.get((tier, key))
            best = self._levels.best(key, known.levels, level) if known is not None else None
            found.setdefault(known.first(best) if known is not None and best else 0, []).append(key)
        return found

    def layers(self, tier: Tier, key: ChunkKey, first: int, count: int, level: str | None) -> ReadLayers | None:
        """`count` layers from `first` on at a level (None: the first that can be decoded); None if there are none."""
        try:
            found = self._found(tier, key, first, count, level)
            if found is None or found.meta is None:
                return found
            return self._decoded(tier, key, first, found.meta, found.blobs)
        except Exception:
            tier.counts.add("corrupt")
            log.exception("Could not read layer %d of %s from tier %s", first, key, tier.name)
            return None

    def encoded(self, tier: Tier, key: ChunkKey, first: int, count: int, level: str) -> EncodedLayers | None:
        """Layers at one level as they stand there, not decoded; None if they cannot be had."""
        found = self._found(tier, key, first, count, level)
        if found is None or found.meta is None or first + count > found.meta.n_layers:
            return None
        decode = partial(self._levels.decoded, key, level)
        return EncodedLayers(found.meta, first, found.blobs, decode, partial(self._amiss, tier, key, level))

    def is_best(self, tier: str, key: ChunkKey, level: str) -> bool:
        """Whether nothing that can be decoded of an entry loses less than this level."""
        known = self._layouts.get((tier, key))
        return known is None or self._levels.best(key, known.levels, None) == level

    def _found(self, tier: Tier, key: ChunkKey, first: int, count: int, level: str | None) -> ReadLayers | None:
        """Bytes alone, by one read where it is known how the entry stands; else by the first one that is learned."""
        known = self._layouts.get((tier.name, key))
        for _ in range(_TRIES):
            chosen = self._chosen(key, known.levels, level) if known is not None else None
            if known is not None and chosen is None:
                return ReadLayers(())
            at = known.first(chosen) if known is not None and chosen else 0
            found = tier.read(key, at + first, count)
            if found is None and at == 0:
                return None
            if found is None:  # written anew, with fewer levels?
                known = None
                continue
            meta, *blobs = found
            known = LevelLayout(meta.levels, meta.n_layers)
            if len(meta.levels) > 1 or (tier.name, key) in self._layouts:
                self._layouts.add((tier.name, key), known)
            chosen = self._chosen(key, meta.levels, level)
            if chosen is not None and known.first(chosen) == at:
                return ReadLayers((), meta.only(chosen), blobs)
        return None

    def _chosen(self, key: ChunkKey, levels: Sequence[str], level: str | None) -> str | None:
        """The level to read: the one that was asked for, if it can be."""
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
            self._amiss(tier, key, meta.levels[0], first, error)
            return None

    def _amiss(self, tier: Tier, key: ChunkKey, level: str, layer: int, error: ValueError) -> None:
        """An entry that cannot be decoded is dropped; one that is made for other tables is left alone."""
        if isinstance(error, OtherTables):
            self._levels.leave(key, level, str(error))
            return
        tier.counts.add("corrupt")
        log.warning("Dropped %s from tier %s: it cannot be decoded from layer %d: %s", key, tier.name, layer, error)
        tier.delete([key])
