"""The codec levels of entries (raw, int8, CacheGen), and the codec tables of models."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ragfuse.codec import INT8, RAW, Codec, CodecTables, LayerMeta, OtherTables, codec_for
from ragfuse.codec.codec import tables_of
from ragfuse.process.shared import LRU
from ragfuse.settings import Settings
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.choices import LEVEL_NAMES, loss
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import ChunkKV, Entry, LayerKV

log = logging.getLogger("ragfuse.store")
NO_TABLES = "no tier of this store has the codec tables of level {}"

TABLES_RECHECK_S = 60.0
"""Seconds after which the tiers are searched again for codec tables that were missing."""
OWNER = digest("codec tables")
"""`ChunkKey.model` of the entries that hold codec tables, in place of a model digest."""
_TABLELESS = frozenset((RAW.name, INT8.name))

_REMEMBERED = 8192


def loss_of(levels: Iterable[str]) -> int:
    """Return the rank of the least lossy level: 0 for raw, the last rank if no level is known."""
    return min(map(loss, levels), default=len(LEVEL_NAMES))


@dataclass(frozen=True)
class EncodedLayers:
    """Consecutive layers of a chunk, encoded at one codec level.

    Args:
        key: Key of the chunk.
        tier: The tier from which the layers were read.
        meta: The description of all layers of the chunk at this level.
        first: Index of the first layer in `blobs`.
        blobs: The encoded layers, uint8 `[nbytes]` each.
        levels: The store's `TierLevels`, whose codecs decode the layers.
        is_best: True if this is the entry's least lossy decodable level.
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

    def decoded(self, layers: range) -> Sequence[LayerKV]:
        """Decode `layers` of the chunk in the calling thread. Raise ValueError on failure.

        A damaged entry is deleted and counted. An entry whose codec tables are missing here
        (`OtherTables`) is not deleted.
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
                "Entry %s cannot be decoded at level %s here, and stays stored but unused: %s",
                self.key,
                level,
                error,
            )
            raise
        except ValueError as error:
            self.tier.counts.add("corrupt")
            message = (
                "Deleted the damaged entry %s from tier %s; layers from %d cannot be decoded: %s"
            )
            log.warning(message, self.key, self.tier.name, layers.start, error)
            self.tier.delete([self.key])
            raise


class TierLevels:
    """The codec levels written to each tier, and the codecs of these levels. Thread-safe.

    A model's codec tables are profiled once. Every slow tier stores two pinned values: the tables,
    keyed by their digest, and the tables' digest, keyed by the model's digest. Each encoded layer
    contains the digest of its tables, so another machine that shares the tier can decode the layer.

    Args:
        tiers: The store's tiers. Slow tiers store the tables.
        written: Codec levels by tier name. A tier that is not named gets raw.
    """

    def __init__(
        self, tiers: Sequence[Tier], written: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._slow = [tier for tier in tiers if tier.slow]
        self._written = {
            tier: tuple(sorted(set(levels), key=loss)) for tier, levels in (written or {}).items()
        }
        self._lock = Lock()
        # (tables, time of the search) by model digest or table digest
        self._known: dict[str, tuple[CodecTables | None, float]] = {}
        self._codecs: dict[tuple[str, str], Codec] = {}  # by level and table digest
        self.undecodable = LRU[tuple[ChunkKey, str], str](_REMEMBERED)
        self._unread = LRU[ChunkKey, str](_REMEMBERED)

    def codec(self, level: str, model: str, tables: str = "") -> Codec | None:
        """Return the codec of a level, or None if the level or its codec tables are unknown.
        `tables` is the digest of the codec tables; "" means the model's current tables.
        """
        if level in _TABLELESS:
            return codec_for(level)
        known = self.tables(tables or model) if level in LEVEL_NAMES else None
        if known is None:
            return None
        with self._lock:
            if (level, known.digest) not in self._codecs:
                self._codecs[level, known.digest] = codec_for(level, known)
            return self._codecs[level, known.digest]

    def tables(self, name: str) -> CodecTables | None:
        """Return the codec tables whose digest is `name`, or the current tables of the model whose
        digest is `name`. Return None if no tier has such tables; tiers are searched again only
        after `TABLES_RECHECK_S` seconds.
        """
        with self._lock:
            found, searched_s = self._known.get(name, (None, float("-inf")))
        if found is not None or time.monotonic() - searched_s < TABLES_RECHECK_S:
            return found
        found = self._found(name)
        with self._lock:
            self._known[name] = found, time.monotonic()
        return found

    def learn(self, model: str, tables: CodecTables) -> None:
        """Encode a model's KV with `tables` from now on; save `tables` in every slow tier."""
        with self._lock:
            self._known |= dict.fromkeys((model, tables.digest), (tables, time.monotonic()))
        for tier in self._slow:
            if not tier.stat([_key(tables.digest)]):
                _save(tier, tables.digest, tables.as_dict())
            if _value_in(tier, model) != tables.digest:
                _save(tier, model, tables.digest)

    def table_entries(self) -> list[Entry]:
        """Return the entries that hold codec tables, which `KVStore.entries` omits."""
        listed = (entry for tier in self._slow for entry in tier.list())
        return [entry for entry in listed if entry.key.model == OWNER]

    def _found(self, name: str) -> CodecTables | None:
        """Search the slow tiers for codec tables (see `tables`); return the first intact copy."""
        for tier in self._slow:
            value = _value_in(tier, name)
            if isinstance(value, str):  # `name` is a model digest
                return self.tables(value)
            found = CodecTables.from_dict(value)
            if found is not None and found.digest == name:
                return found
        return None

    def of(self, tier: str) -> tuple[str, ...]:
        """Return the levels written to a tier, least lossy first."""
        return self._written.get(tier) or (RAW.name,)

    def readable(self, entries: Mapping[ChunkKey, Entry]) -> dict[ChunkKey, Entry]:
        """Return the entries that can be decoded, each reduced to its decodable levels."""
        found = {}
        for key, entry in entries.items():
            if levels := self._decodable(key, entry.sizes):
                found[key] = replace(entry, sizes={level: entry.sizes[level] for level in levels})
            else:
                reasons = (
                    self.undecodable.get((key, level)) or NO_TABLES.format(level)
                    for level in entry.sizes
                )
                self._unread.add(
                    key, f"the entry cannot be decoded: {'; '.join(dict.fromkeys(reasons))}"
                )
        return found

    def why_not(self, key: ChunkKey) -> str:
        """Return the reason why `readable` last omitted an entry, or "" if no reason is known."""
        return self._unread.get(key) or ""

    def read(
        self, tier: Tier, key: ChunkKey, layers: range, level: str | None
    ) -> EncodedLayers | None:
        """Read encoded layers at `level`; a `level` of None selects the first decodable level."""
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
        """Decode layers of one entry at one level, with the codec tables used for encoding.

        Raises OtherTables if the store lacks these tables, and ValueError if the bytes are damaged.
        """
        codec = self.codec(level, key.model)
        if codec is RAW:
            return RAW.decode_all(blobs, metas)
        if tables := tables_of(blobs[0]):
            codec = self.codec(level, key.model, tables)
        if codec is None:
            raise OtherTables(NO_TABLES.format(level))
        return [codec.decode(blob, layer) for blob, layer in zip(blobs, metas, strict=True)]

    def _decodable(self, key: ChunkKey, levels: Iterable[str]) -> list[str]:
        """Return those of `levels` at which an entry can be decoded, in the order of `levels`."""
        return [
            level
            for level in levels
            if (key, level) not in self.undecodable and self.codec(level, key.model)
        ]

    def at_levels(self, key: ChunkKey, whole: Whole, wanted: Sequence[str]) -> Whole:
        """Return an entry at the `wanted` levels. Levels that the entry lacks are encoded from raw,
        never from a lossy level. If no wanted level is possible, return only the raw level. If the
        entry has no raw level either, return the entry unchanged.
        """
        found = [
            each
            for level in sorted(set(wanted), key=loss)
            if (each := self._at_or_none(key, whole, level)) is not None
        ]
        if not found:
            return only(whole, RAW.name) if RAW.name in whole[0].levels else whole
        return joined(found)

    def _at_or_none(self, key: ChunkKey, whole: Whole, level: str) -> Whole | None:
        """Return the entry at one level, encoded from raw if necessary; None if impossible."""
        if level in whole[0].levels:
            return only(whole, level)
        codec = self.codec(level, key.model)
        if RAW.name not in whole[0].levels:
            return None
        try:
            if codec is None:
                raise ValueError("this store has no codec tables of the model for this level")
            meta, blobs = only(whole, RAW.name)
            layers = RAW.decode_all(blobs, meta.layers)
            encoded = tuple(codec.encode(layer, at) for at, layer in enumerate(layers))
            return EntryMeta.of(ChunkKV(tuple(layers)), level, encoded), encoded
        except ValueError as error:
            _warn_once(key.model, level, str(error))
            return None


@lru_cache(maxsize=1024)
def _warn_once(model: str, level: str, why: str) -> None:
    """Log that a model's KV cannot be encoded at a level, once per model, level and reason."""
    log.warning(
        "KV of model %s cannot be stored at level %s, so other levels or raw are used: %s",
        model[:8],
        level,
        why,
    )


def only(whole: Whole, level: str) -> Whole:
    """Return an entry reduced to one codec level."""
    meta, blobs = whole
    wanted = meta.pieces(range(meta.n_layers), level)
    assert wanted is not None
    return meta.only(level), blobs[wanted.start : wanted.stop]


def joined(wholes: Sequence[Whole]) -> Whole:
    """Merge entries with the same KV at different levels into one entry."""
    levels = tuple(level for meta, _ in wholes for level in meta.levels)
    layers = tuple(layer for meta, _ in wholes for layer in meta.layers)
    return EntryMeta(wholes[0][0].n_tokens, levels, layers), tuple(
        blob for _, blobs in wholes for blob in blobs
    )


def wants_tables(settings: Settings) -> bool:
    """Return whether these settings give any tier a level that needs codec tables."""
    levels = {level for each in settings.written.values() for level in each}
    return not levels <= _TABLELESS


def _key(name: str) -> ChunkKey:
    return ChunkKey(OWNER, digest("tables", name))


def _save(tier: Tier, name: str, value: object) -> None:
    """Save JSON in a tier as a pinned entry of one layer, one token and one key channel.

    As an entry, the JSON is written atomically, has a checksum, and counts towards the capacity.
    """
    text = json.dumps(value).encode()
    blob = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    layer = LayerMeta((1, 1, 1), (1, 1, len(text) - 1), "float8_e5m2", len(text))
    if tier.put(_key(name), EntryMeta(1, (RAW.name,), (layer,)), (blob,)):
        tier.pin([_key(name)], True)


def _value_in(tier: Tier, name: str) -> Any:
    """Return the JSON saved under `name`, or None if the JSON is missing or damaged."""
    for blob in (tier.get(_key(name), range(1)) or ())[1:]:
        with suppress(ValueError):
            return json.loads(blob.numpy().tobytes())
    return None
