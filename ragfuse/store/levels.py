"""The codec levels of entries: which ones each tier is written at, and which stored ones can be decoded here.

A codec level is one way to encode KV, such as raw, int8 or a CacheGen level; `types/levels.py` lists them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Final, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from ragfuse.codec import INT8, RAW, Codec, LayerMeta, OtherTables
from ragfuse.codec.container import tables_of
from ragfuse.process.lru import LRU
from ragfuse.store.tier import EntryMeta, Whole
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.levels import LEVEL_NAMES, loss

log = logging.getLogger("ragfuse.store")

K = TypeVar("K")
V = TypeVar("V")
_REMEMBERED = 8192


class Codecs(Protocol):
    """A function that returns the codec of a level for a model."""

    def __call__(self, level: str, model: str) -> Codec | None:
        """Return the codec of a level for a model digest (`ChunkKey.model`), or None if there is none."""
        ...


@runtime_checkable
class KnowsTables(Protocol):
    """Optional part of `Codecs`: codecs for layers that another machine encoded with its own tables."""

    def packed(self, level: str, tables: str) -> Codec | None:
        """Return the codec of a level with the tables of this digest, or None if the tables are not available."""
        ...


def without_tables(level: str, model: str) -> Codec | None:
    """Return the codec of a level that needs no tables of the model (raw, int8); None for other levels."""
    return RAW if level == RAW.name else INT8 if level == INT8.name else None


TABLELESS: Final[Codecs] = without_tables


def by_loss(levels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct levels, least lossy first; unknown levels come last, in the given order."""
    known = {level: rank for rank, level in enumerate(LEVEL_NAMES)}
    return tuple(sorted(dict.fromkeys(levels), key=lambda level: known.get(level, len(known))))


def loss_of(levels: Iterable[str]) -> int:
    """Return the rank of the least lossy of these levels: 0 for raw, more for lossier ones, most for unknown ones."""
    return min(map(loss, levels), default=len(LEVEL_NAMES))


class TierLevels:
    """The codec levels that each tier is written at, and the codecs that encode and decode them.

    Args:
        codecs: Returns the codec of a level for a model.
        written: Levels by tier name; tiers that are not named are written raw.
    """

    def __init__(self, codecs: Codecs = TABLELESS, written: Mapping[str, Sequence[str]] | None = None) -> None:
        self.codecs, self._written = codecs, {tier: by_loss(levels) for tier, levels in (written or {}).items()}
        self._undecodable = LRU[tuple[ChunkKey, str], str](_REMEMBERED)
        self._unwritten = LRU[tuple[str, str, str], None](_REMEMBERED)  # model, level, why: logged once

    @property
    def is_mixed(self) -> bool:
        """Whether any tier is written at other levels than raw."""
        return any(levels != (RAW.name,) for levels in self._written.values())

    def of(self, tier: str) -> tuple[str, ...]:
        """Return the levels that a tier is written at, least lossy first."""
        return self._written.get(tier) or (RAW.name,)

    def readable(self, key: ChunkKey, levels: Iterable[str]) -> list[str]:
        """Return those of an entry's levels that can be decoded here, in the given order."""
        return [level for level in levels if (key, level) not in self._undecodable and self.codecs(level, key.model)]

    def decoded(self, key: ChunkKey, level: str, blobs: Sequence[Tensor], metas: Sequence[LayerMeta]) -> list[LayerKV]:
        """Decode layers of one entry at one level, with the tables that they were encoded with.

        Raises:
            OtherTables: It was encoded with tables, bins or a codec version that are not available here.
            ValueError: The bytes cannot be decoded.
        """
        codec = self.codecs(level, key.model)
        if codec is None:
            raise OtherTables(f"this store has no codec tables for level {level}")
        if codec is RAW:
            return RAW.decode_all(blobs, metas)
        try:
            return [codec.decode(blob, layer) for blob, layer in zip(blobs, metas, strict=True)]
        except OtherTables:
            tables = tables_of(blobs[0])
            other = self.codecs.packed(level, tables) if isinstance(self.codecs, KnowsTables) and tables else None
            if other is None:
                raise
            return [other.decode(blob, layer) for blob, layer in zip(blobs, metas, strict=True)]

    def mark_undecodable(self, key: ChunkKey, level: str, why: str) -> None:
        """Treat a level of an entry as not stored from now on: it cannot be decoded here, although there is a codec."""
        if (key, level) not in self._undecodable:
            log.warning("%s cannot be decoded here at level %s, so it stays stored but unused: %s", key, level, why)
        self._undecodable.add((key, level), why)

    def why_not(self, key: ChunkKey, levels: Iterable[str]) -> str:
        """Return in a few words why none of an entry's levels can be decoded here."""
        reasons = (
            self._undecodable.get((key, level)) or f"this store has no codec tables for level {level}"
            for level in levels
        )
        return f"it cannot be decoded: {'; '.join(dict.fromkeys(reasons))}"

    def at_levels(self, key: ChunkKey, whole: Whole, wanted: Sequence[str]) -> Whole:
        """Return the entry at the wanted levels: levels that it has are taken as they are, others encoded from raw.

        Levels that it lacks and that cannot be encoded are left out; a lossy level is never the source of another. If
        none is left, the entry is returned as raw, or as it is if it has no raw level.
        """
        meta, _ = whole
        if meta.levels == tuple(wanted):
            return whole
        found = [each for level in by_loss(wanted) if (each := self._at_or_none(key, whole, level)) is not None]
        if not found:
            return only(whole, RAW.name) if RAW.name in meta.levels else whole
        return joined(found)

    def nbytes(self, key: ChunkKey, kv: ChunkKV, wanted: Sequence[str]) -> int:
        """Return the bytes that a chunk's KV occupies at the wanted levels; encodes it to find out."""
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
            if (failure := (key.model, level, str(error))) not in self._unwritten:
                self._unwritten.add(failure, None)
                message = "%s is stored without level %s, raw if none is left (logged once for its model): %s"
                log.warning(message, key, level, error)
            return None


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
    return EntryMeta(wholes[0][0].n_tokens, levels, layers), tuple(blob for _, blobs in wholes for blob in blobs)


class EntryContent:
    """An entry that is being saved to tiers, encoded for a tier when it is first needed. Threads may share it.

    Args:
        levels: Encodes it.
        key: The chunk.
        whole: The entry as it was given.
        wanted: Levels by tier name; tiers that are not named get the entry as it is.
    """

    def __init__(self, levels: TierLevels, key: ChunkKey, whole: Whole, wanted: Mapping[str, Sequence[str]]) -> None:
        self.meta = whole[0]
        self.key, self._levels, self._whole, self._wanted = key, levels, whole, wanted
        self._lock, self._made = Lock(), dict[tuple[str, ...], Whole]()

    def is_ready(self, tier: str) -> bool:
        """Return whether a tier can get the entry without encoding anything."""
        return RAW.name not in self.meta.levels or set(self._wanted.get(tier, ())) <= set(self.meta.levels)

    def of(self, tier: str) -> Whole:
        """Return the entry at the levels of a tier."""
        wanted = tuple(self._wanted.get(tier, self.meta.levels))
        with self._lock:
            if wanted not in self._made:
                self._made[wanted] = self._levels.at_levels(self.key, self._whole, wanted)
            return self._made[wanted]
