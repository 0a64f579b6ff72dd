"""The codecs of models: finds the codec tables that their KV was encoded with.

A model's tables are profiled once, from text that comes with ragfuse, and saved in every slow tier,
pinned: under the tables' digest, which each encoded layer names, so that another machine that
shares the tier can decode what this one encoded; and their digest under the model's.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ragfuse.codec import RAW, Codec, CodecTables, LayerMeta, codec_for
from ragfuse.settings import Settings
from ragfuse.store.levels import tableless
from ragfuse.store.tier import EntryMeta, Tier
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")

TABLES_RECHECK_S = 60.0
"""Seconds until missing tables are looked for again in the tiers."""
OWNER = digest("codec tables")
"""The `ChunkKey.model` of tables in a tier, in place of a model's digest."""


class CodecRegistry:
    """The codecs of a store, by level and model digest, or by level and tables. Threads may share
    it.

    Args:
        tiers: The store's tiers; the slow ones keep tables.
        clock: Returns the time in seconds.
    """

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers, self._clock = [tier for tier in tiers if tier.slow], clock
        self._lock = threading.Lock()
        # by model or digest, and when it was asked for
        self._known: dict[str, tuple[CodecTables | None, float]] = {}
        self._codecs: dict[tuple[str, str], Codec] = {}  # by level and digest of tables

    def __call__(self, level: str, model: str, tables: str = "") -> Codec | None:
        """Return the codec of a level (`Codecs`), with tables from a tier; None if there is
        none.
        """
        plain = tableless(level, model)
        if plain is not None or level not in LEVEL_NAMES:
            return plain
        known = self.tables(tables or model)
        if known is None:
            return None
        with self._lock:
            if (level, known.digest) not in self._codecs:
                self._codecs[level, known.digest] = codec_for(level, known)
            return self._codecs[level, known.digest]

    def tables(self, name: str) -> CodecTables | None:
        """Return the tables of a digest, or those that a model's KV is written with.

        Unknown ones are looked for again only after `TABLES_RECHECK_S`.

        Args:
            name: The digest of the tables, or the digest of model and tenant.

        Returns:
            The tables; None where no tier has them, as where the model has not been profiled.
        """
        with self._lock:
            found, searched_s = self._known.get(name, (None, float("-inf")))
        if found is not None or self._clock() - searched_s < TABLES_RECHECK_S:
            return found
        found = self._found(name)
        with self._lock:
            self._known[name] = found, self._clock()
        return found

    def learn(self, model: str, tables: CodecTables) -> None:
        """Set the tables that a model's KV is written with from now on, here and in later processes
        on this store.

        Tiers that cannot save them go without.
        """
        with self._lock:
            self._known |= dict.fromkeys((model, tables.digest), (tables, self._clock()))
        for tier in self._tiers:
            if not tier.stat([_key(tables.digest)]):
                _save(tier, tables.digest, tables.as_dict())
            if _value_in(tier, model) != tables.digest:
                _save(tier, model, tables.digest)

    def entries(self) -> list[Entry]:
        """Return the entries that hold tables, which `KVStore.entries` leaves out."""
        listed = (entry for tier in self._tiers for entry in tier.list())
        return [entry for entry in listed if entry.key.model == OWNER]

    def _found(self, name: str) -> CodecTables | None:
        """Return tables from the first tier that has them undamaged."""
        for tier in self._tiers:
            value = _value_in(tier, name)
            if isinstance(value, str):  # of a model
                return self.tables(value)
            found = CodecTables.from_dict(value)
            if found is not None and found.digest == name:
                return found
        return None


def wants_tables(settings: Settings) -> bool:
    """Return whether a tier is written at a level that needs codec tables."""
    levels = {level for each in settings.written.values() for level in each}
    return any(tableless(level, "") is None for level in levels)


def _key(name: str) -> ChunkKey:
    return ChunkKey(OWNER, digest("tables", name))


def _save(tier: Tier, name: str, value: object) -> None:
    """Save JSON in a tier, pinned, as the values of an entry of one token, one layer and one key
    channel.

    So it is written whole, has a checksum and counts towards the capacity like any other entry.
    """
    text = json.dumps(value).encode()
    blob = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    layer = LayerMeta((1, 1, 1), (1, 1, len(text) - 1), "float8_e5m2", len(text))
    if tier.put(_key(name), EntryMeta(1, (RAW.name,), (layer,)), (blob,)):
        tier.pin([_key(name)], True)


def _value_in(tier: Tier, name: str) -> Any:
    """Return saved JSON; None if there is none or it is damaged."""
    for blob in (tier.get(_key(name), range(1)) or ())[1:]:
        with suppress(ValueError):
            return json.loads(blob.numpy().tobytes())
    return None
