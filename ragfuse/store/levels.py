"""The codec levels of entries: which ones each tier is written at, which can be decoded here, and
reading at one.

A codec level is one way to encode KV, such as raw, int8 or a CacheGen level; `types/choices.py`
lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from ragfuse.codec import INT8, RAW, Codec, LayerMeta, OtherTables
from ragfuse.codec.codec import tables_of
from ragfuse.process.lru import LRU
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.choices import LEVEL_NAMES, loss
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV, Entry, LayerKV

log = logging.getLogger("ragfuse.store")

_REMEMBERED = 8192


class Codecs(Protocol):
    """A function that returns the codec of a level for a model."""

    def __call__(self, level: str, model: str, tables: str = "") -> Codec | None:
        """Return the codec of a level for a model digest (`ChunkKey.model`), or None if there is
        none.

        Args:
            level: Name of the level.
            model: The model digest.
            tables: Digest of the codec tables that layers were encoded with, on any machine; "":
                those of the model.
        """
        ...


def tableless(level: str, model: str, tables: str = "") -> Codec | None:
    """Return the codec of a level that needs no tables of the model (raw, int8); None for other
    levels.
    """
    return RAW if level == RAW.name else INT8 if level == INT8.name else None


def loss_of(levels: Iterable[str]) -> int:
    """Return the rank of the least lossy of these levels: 0 for raw, more for lossier ones, most
    for unknown ones.
    """
    return min(map(loss, levels), default=len(LEVEL_NAMES))


@dataclass(frozen=True)
class EncodedLayers:
    """Consecutive layers of a chunk at one level, read but not decoded yet.

    Args:
        key: The chunk.
        tier: The tier that they were read from.
        meta: The description of the whole chunk at that level.
        first: Index of the first layer.
        blobs: The encoded layers, uint8 `[nbytes]` each.
        levels: Decodes them.
        is_best: Whether the entry has no less lossy level that can be decoded here.
    """

    key: ChunkKey
    tier: Tier
    meta: EntryMeta
    first: int
    blobs: Sequence[Tensor]
    levels: TierLevels
    is_best: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded layers."""
        return sum(blob.numel() for blob in self.blobs)

    def layer(self, at: int) -> LayerKV:
        """Decode the layer with index `at`, on the calling thread (`decoded`)."""
        return self.decoded(range(at, at + 1))[0]

    def decoded(self, layers: range) -> Sequence[LayerKV]:
        """Decode some of the layers, on the calling thread.

        An entry that cannot be decoded is dropped and counted; one of other tables is left alone.

        Raises:
            ValueError: Their bytes cannot be decoded.
        """
        blobs = self.blobs[layers.start - self.first : layers.stop - self.first]
        level = self.meta.levels[0]
        try:
            return self.levels.decoded(
                self.key, level, blobs, self.meta.layers[layers.start : layers.stop]
            )
        except OtherTables as error:
            self.levels.undecodable.add((self.key, level), str(error))
            log.warning(
                "%s cannot be decoded here at level %s, so it stays stored but unused: %s",
                self.key,
                level,
                error,
            )
            raise
        except ValueError as error:
            self.tier.counts.add("corrupt")
            message = (
                "Deleted the damaged entry %s from tier %s: it cannot be decoded from layer %d"
                " onwards: %s"
            )
            log.warning(message, self.key, self.tier.name, layers.start, error)
            self.tier.delete([self.key])
            raise


class TierLevels:
    """The codec levels that each tier is written at, and the codecs that encode and decode them.

    Args:
        codecs: Returns the codec of a level for a model.
        written: Levels by tier name; tiers that are not named are written raw.

    Attributes:
        undecodable: Levels of entries that cannot be decoded here although there is a codec, and
            why; they count as not stored.
    """

    def __init__(self, codecs: Codecs, written: Mapping[str, Sequence[str]] | None = None) -> None:
        self.codecs, self._written = (
            codecs,
            {
                tier: tuple(sorted(set(levels), key=loss))
                for tier, levels in (written or {}).items()
            },
        )
        self.undecodable = LRU[tuple[ChunkKey, str], str](_REMEMBERED)
        self._unread = LRU[ChunkKey, str](_REMEMBERED)

    def of(self, tier: str) -> tuple[str, ...]:
        """Return the levels that a tier is written at, least lossy first."""
        return self._written.get(tier) or (RAW.name,)

    def readable(self, entries: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, Entry]:
        """Return the entries that can be decoded here, each with only the levels that can (see
        `why_not`).
        """
        found = {}
        for key, entry in entries.items():
            if levels := self._decodable(key, entry.sizes):
                found[key] = replace(entry, sizes={level: entry.sizes[level] for level in levels})
            else:
                missing = "this store has no codec tables for level"
                reasons = (
                    self.undecodable.get((key, level)) or f"{missing} {level}"
                    for level in entry.sizes
                )
                self._unread.add(key, f"it cannot be decoded: {'; '.join(dict.fromkeys(reasons))}")
        return found

    def why_not(self, key: ChunkKey) -> str:
        """Return why `readable` left out an entry when it saw it last, if that is remembered; else
        "".
        """
        return self._unread.get(key) or ""

    def read(
        self, tier: Tier, key: ChunkKey, layers: range, level: str | None
    ) -> EncodedLayers | None:
        """Read some layers of an entry at a level (None: the first that can be decoded here),
        without decoding them.
        """
        found = tier.get(key, layers, level)
        if found is None:
            return None
        meta, *blobs = found
        best = next(iter(self._decodable(key, meta.levels)), None)
        wanted = level or best
        if wanted is None or not self._decodable(key, [wanted]):
            return None
        if level is None and wanted != meta.levels[0]:
            return self.read(tier, key, layers, wanted)
        return EncodedLayers(
            key, tier, meta.only(wanted), layers.start, blobs, self, wanted == best
        )

    def decoded(
        self, key: ChunkKey, level: str, blobs: Sequence[Tensor], metas: Sequence[LayerMeta]
    ) -> list[LayerKV]:
        """Decode layers of one entry at one level, with the tables that they were encoded with.

        Raises:
            OtherTables: It was encoded with tables, bins or a codec version that are not available
                here.
            ValueError: The bytes cannot be decoded.
        """
        codec = self.codecs(level, key.model)
        if codec is RAW:
            return RAW.decode_all(blobs, metas)
        if tables := tables_of(blobs[0]):
            codec = self.codecs(level, key.model, tables)
        if codec is None:
            raise OtherTables(f"this store has no codec tables for level {level}")
        return [codec.decode(blob, layer) for blob, layer in zip(blobs, metas, strict=True)]

    def _decodable(self, key: ChunkKey, levels: Iterable[str]) -> list[str]:
        """Return those of an entry's levels that can be decoded here, in the given order."""
        return [
            level
            for level in levels
            if (key, level) not in self.undecodable and self.codecs(level, key.model)
        ]

    def at_levels(self, key: ChunkKey, whole: Whole, wanted: Sequence[str]) -> Whole:
        """Return the entry at the wanted levels: levels that it has are taken as they are, others
        encoded from raw.

        Levels that it lacks and that cannot be encoded are left out; a lossy level is never the
        source of another. If none is left, the entry is returned as raw, or as it is if it has no
        raw level.
        """
        meta, _ = whole
        if meta.levels == tuple(wanted):
            return whole
        found = [
            each
            for level in sorted(set(wanted), key=loss)
            if (each := self._at_or_none(key, whole, level)) is not None
        ]
        if not found:
            return only(whole, RAW.name) if RAW.name in meta.levels else whole
        return joined(found)

    def nbytes(self, key: ChunkKey, kv: ChunkKV, wanted: Sequence[str]) -> int:
        """Return the bytes that a chunk's KV occupies at the wanted levels; encodes it to
        find out.
        """
        blobs = RAW.encode_all(kv.layers)
        return self.at_levels(key, (EntryMeta.of(kv, RAW.name, blobs), blobs), wanted)[0].nbytes

    def _at_or_none(self, key: ChunkKey, whole: Whole, level: str) -> Whole | None:
        """Return the entry at one level, encoding it from raw if it does not have that level.

        None if it has neither, or cannot be encoded, which is logged once.
        """
        if level in whole[0].levels:
            return only(whole, level)
        codec = self.codecs(level, key.model)
        if RAW.name not in whole[0].levels:
            return None
        try:
            if codec is None:
                raise ValueError("this store has no codec tables of its model for it")
            meta, blobs = only(whole, RAW.name)
            layers = RAW.decode_all(blobs, meta.layers)
            encoded = tuple(codec.encode(layer, at) for at, layer in enumerate(layers))
            return EntryMeta.of(ChunkKV(tuple(layers)), level, encoded), encoded
        except ValueError as error:
            _warn_once(key.model, level, str(error))
            return None


@lru_cache(maxsize=1024)
def _warn_once(model: str, level: str, why: str) -> None:
    """Log, once for each model, that its KV cannot be encoded at a level."""
    log.warning(
        "KV of model %s is stored without level %s, raw if none is left: %s", model[:8], level, why
    )


def only(whole: Whole, level: str) -> Whole:
    """Return an entry reduced to one of its levels."""
    meta, blobs = whole
    wanted = meta.pieces(range(meta.n_layers), level)
    assert wanted is not None
    return meta.only(level), blobs[wanted.start : wanted.stop]


def joined(wholes: Sequence[Whole]) -> Whole:
    """Join entries that hold the same KV at different levels into one entry."""
    levels = tuple(level for meta, _ in wholes for level in meta.levels)
    layers = tuple(layer for meta, _ in wholes for layer in meta.layers)
    return EntryMeta(wholes[0][0].n_tokens, levels, layers), tuple(
        blob for _, blobs in wholes for blob in blobs
    )
