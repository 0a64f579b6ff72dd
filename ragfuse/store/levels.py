"""Codec levels of entries: which are written into which tier, and which of those that are kept can be read.

Where bytes are kept is the tiers' business, how they are made and read back that of `codec`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from ragfuse.codec import INT8, RAW, Codec, LayerMeta, OtherTables
from ragfuse.codec.container import tables_of
from ragfuse.process.fork import ForkLock
from ragfuse.store.tier import EntryMeta, Whole
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import ChunkKV, Entry, LayerKV
from ragfuse.types.levels import LEVEL_NAMES

log = logging.getLogger("ragfuse.store")

K = TypeVar("K")
V = TypeVar("V")
_REMEMBERED = 8192


class Codecs(Protocol):
    """Gives the codec of a level for a model (the digest in its keys); None where there is none."""

    def __call__(self, level: str, model: str) -> Codec | None:
        """The codec, which encodes and decodes."""
        ...


@runtime_checkable
class KnowsTables(Protocol):
    """What `Codecs` may have beside: codecs of what others have packed with their own tables."""

    def packed(self, level: str, tables: str) -> Codec | None:
        """The codec of a level with the tables of this digest; None where they are not to be had."""
        ...


def without_tables(level: str, model: str) -> Codec | None:
    """The codecs that need to know nothing of a model."""
    return RAW if level == RAW.name else INT8 if level == INT8.name else None


TABLELESS: Final[Codecs] = without_tables


def by_loss(levels: Iterable[str]) -> tuple[str, ...]:
    """These levels once each, what loses least first; those that nobody knows stand behind, in their order."""
    known = {level: rank for rank, level in enumerate(LEVEL_NAMES)}
    return tuple(sorted(dict.fromkeys(levels), key=lambda level: known.get(level, len(known))))


def loss_of(levels: Iterable[str]) -> int:
    """How much the best of these levels loses, as a number to compare; the same for all that nobody knows."""
    return min(
        (LEVEL_NAMES.index(level) if level in LEVEL_NAMES else len(LEVEL_NAMES) for level in levels),
        default=len(LEVEL_NAMES),
    )


class Recent(Generic[K, V]):
    """The `limit` values that were added last, by key. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._lock, self._limit, self._known = ForkLock(), limit, OrderedDict[K, V]()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: K) -> bool:
        return key in self._known

    def get(self, key: K) -> V | None:
        """The value of a key, if it is remembered."""
        return self._known.get(key)

    def add(self, key: K, value: V) -> V:
        """Remember a value, which is given back."""
        with self._lock:
            self._known[key] = value
            self._known.move_to_end(key)
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
        return value

    def discard(self, key: K) -> None:
        """Forget a key."""
        with self._lock:
            self._known.pop(key, None)


class TierLevels:
    """What is written into each tier, and with which codecs. `written` maps a tier's name to its levels, else raw."""

    def __init__(self, codecs: Codecs = TABLELESS, written: Mapping[str, Sequence[str]] | None = None) -> None:
        self.codecs, self._written = codecs, {tier: by_loss(levels) for tier, levels in (written or {}).items()}
        self._strange = Recent[tuple[ChunkKey, str], str](_REMEMBERED)
        self._unwritten = Recent[tuple[str, str, str], None](_REMEMBERED)  # model, level, why: told once

    @property
    def is_mixed(self) -> bool:
        """Whether any tier is written in something else than raw."""
        return any(levels != (RAW.name,) for levels in self._written.values())

    def of(self, tier: str) -> tuple[str, ...]:
        """The levels that are written into a tier."""
        return self._written.get(tier) or (RAW.name,)

    def readable(self, key: ChunkKey, levels: Iterable[str]) -> list[str]:
        """Those of a key's levels that can be decoded here, in their order."""
        return [level for level in levels if (key, level) not in self._strange and self.codecs(level, key.model)]

    def decoded(self, key: ChunkKey, level: str, blobs: Sequence[Tensor], metas: Sequence[LayerMeta]) -> list[LayerKV]:
        """Layers of one entry at a level, with the tables that packed them; ValueError where they cannot be decoded."""
        codec = self.codecs(level, key.model)
        if codec is None:
            raise OtherTables(f"there are no tables for {level}")
        try:
            return [codec.decode(blob, layer) for blob, layer in zip(blobs, metas, strict=True)]
        except OtherTables:
            tables = tables_of(blobs[0])
            other = self.codecs.packed(level, tables) if isinstance(self.codecs, KnowsTables) and tables else None
            if other is None:
                raise
            return [other.decode(blob, layer) for blob, layer in zip(blobs, metas, strict=True)]

    def leave(self, key: ChunkKey, level: str, why: str) -> None:
        """A level of this entry cannot be decoded here, although there is a codec: it is not there from now on."""
        if (key, level) not in self._strange:
            log.warning("%s is left alone at level %s: %s", key, level, why)
        self._strange.add((key, level), why)

    def why_not(self, key: ChunkKey, levels: Iterable[str]) -> str:
        """Why none of the levels that an entry has can be decoded here, in a few words."""
        told = (self._strange.get((key, level)) or f"there are no tables for {level}" for level in levels)
        return f"it cannot be decoded: {'; '.join(dict.fromkeys(told))}"

    def best(self, key: ChunkKey, levels: Sequence[str], wanted: str | None) -> str | None:
        """The level that is wanted if it can be read, else the first that can."""
        there = self.readable(key, [wanted] if wanted in levels else ())  # type: ignore[list-item]
        return next(iter(there or self.readable(key, levels)), None)

    def made(self, key: ChunkKey, whole: Whole, wanted: Sequence[str]) -> Whole:
        """The entry at the wanted levels: those it has are taken, the others encoded from raw.

        What cannot be had is left out; where that is all, the entry comes as raw, or as it is where it has no raw:
        nothing that was lost comes back, and nothing lossy is encoded again.
        """
        meta, _ = whole
        if meta.levels == tuple(wanted):
            return whole
        found = [each for level in by_loss(wanted) if (each := self._at_or_none(key, whole, level)) is not None]
        if not found:
            return only(whole, RAW.name) if RAW.name in meta.levels else whole
        return joined(found)

    def nbytes(self, key: ChunkKey, kv: ChunkKV, wanted: Sequence[str]) -> int:
        """Bytes that the KV of a key takes at the wanted levels; it is encoded, to know."""
        blobs = tuple(RAW.encode(layer, at).cpu() for at, layer in enumerate(kv.layers))
        return self.made(key, (EntryMeta.of(kv, RAW.name, blobs), blobs), wanted)[0].nbytes

    def _at_or_none(self, key: ChunkKey, whole: Whole, level: str) -> Whole | None:
        """The entry at one level; None, and told, where it cannot be encoded so."""
        if level not in whole[0].levels and RAW.name not in whole[0].levels:
            return None
        try:
            return self.at(key, whole, level)
        except ValueError as error:
            if (told := (key.model, level, str(error))) not in self._unwritten:
                self._unwritten.add(told, None)
                log.warning("%s is not written as %s, nor are others like it: %s", key, level, error)
            return None

    def check(self, key: ChunkKey, level: str, whole: Whole) -> None:
        """ValueError if an entry cannot be decoded at one of its levels."""
        meta, blobs = only(whole, level)
        self.decoded(key, level, blobs, meta.layers)

    def at(self, key: ChunkKey, whole: Whole, level: str) -> Whole:
        """The entry at one level; ValueError, and why, where it neither has that nor can be encoded so."""
        if level in whole[0].levels:
            return only(whole, level)
        if RAW.name not in whole[0].levels:
            raise ValueError(f"it is kept as {', '.join(whole[0].levels)}, and only what is kept raw is encoded")
        codec, (meta, blobs) = self.codecs(level, key.model), only(whole, RAW.name)
        if codec is None:
            raise ValueError(f"there is no codec for {level} and its model here")
        layers = [RAW.decode(blob, layer) for blob, layer in zip(blobs, meta.layers, strict=True)]
        encoded = tuple(codec.encode(layer, at) for at, layer in enumerate(layers))
        metas = tuple(LayerMeta.of(layer, blob) for layer, blob in zip(layers, encoded, strict=True))
        return EntryMeta(meta.n_tokens, (level,), metas), encoded


def pieces_of(entry: Entry) -> int:
    """How many pieces an entry has, as a tier tells of it."""
    return entry.n_layers * len(entry.sizes)


def only(whole: Whole, level: str) -> Whole:
    """An entry without its other levels."""
    meta, blobs = whole
    first = meta.first(level)
    return meta.only(level), blobs[first : first + meta.n_layers]


def joined(wholes: Sequence[Whole]) -> Whole:
    """One entry of several that hold the same KV at different levels."""
    levels = tuple(level for meta, _ in wholes for level in meta.levels)
    layers = tuple(layer for meta, _ in wholes for layer in meta.layers)
    return EntryMeta(wholes[0][0].n_tokens, levels, layers), tuple(blob for _, blobs in wholes for blob in blobs)


class EntryContent:
    """An entry on its way into tiers, encoded for each when it is first asked for. Threads may share it.

    wanted: the levels of tiers, by name; those that are not in it get the entry as it is.
    """

    def __init__(self, levels: TierLevels, key: ChunkKey, whole: Whole, wanted: Mapping[str, Sequence[str]]) -> None:
        self.meta = whole[0]
        self.key, self._levels, self._whole, self._wanted = key, levels, whole, wanted
        self._lock, self._made = Lock(), dict[tuple[str, ...], Whole]()

    def is_ready(self, tier: str) -> bool:
        """Whether nothing is left to be encoded for a tier."""
        return RAW.name not in self.meta.levels or set(self._wanted.get(tier, ())) <= set(self.meta.levels)

    def of(self, tier: str) -> Whole:
        """The entry as a tier gets it."""
        wanted = tuple(self._wanted.get(tier, self.meta.levels))
        with self._lock:
            if wanted not in self._made:
                self._made[wanted] = self._levels.made(self.key, self._whole, wanted)
            return self._made[wanted]


class LevelLayout(NamedTuple):
    """Where the levels of one entry stand."""

    levels: tuple[str, ...]
    n_layers: int

    def first(self, level: str) -> int:
        """The piece that a level begins with; 0 for one that is not there."""
        return self.levels.index(level) * self.n_layers if level in self.levels else 0
