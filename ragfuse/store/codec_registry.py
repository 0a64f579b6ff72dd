"""Codecs of the models whose KV is kept: which tables pack it, as the store's catalog and its slow tiers keep them.

A model's tables are made once, from text that comes along, and kept in the catalog; beside the KV in every slow tier
they lie by their digest, which each packed layer names: so another machine that shares a tier reads what this one
packed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence

from ragfuse.codec import Codec, CodecTables, codec_for
from ragfuse.process.fork import ForkLock
from ragfuse.settings import AUTO_LEVEL, Settings
from ragfuse.store import Tier
from ragfuse.store.catalog import Catalog
from ragfuse.store.levels import TABLELESS
from ragfuse.store.named import as_entry, value_of
from ragfuse.store.tier import parsed
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.levels import LEVEL_NAMES

log = logging.getLogger("ragfuse.engine")

TABLES_RECHECK_S = 60.0
"""Seconds after which the catalog, or a tier, is asked again for tables that it did not have."""
OWNER = digest("codec tables")
"""What tables in a tier are kept under, where KV has its model."""


class CodecRegistry:
    """Gives codecs by level and model (the digest in keys), and by the tables that packed a layer. Threads share it.

    catalog: the store's. tiers: the store's, of which the slow ones keep tables, too; known once the store is open.
    """

    def __init__(
        self, catalog: Catalog, tiers: Sequence[Tier] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._catalog, self.tiers, self._clock = catalog, tiers, clock
        self._lock = ForkLock()
        self._known: dict[str, tuple[CodecTables | None, float]] = {}  # by model or digest, and when it was asked for
        self._codecs: dict[tuple[str, str], Codec] = {}  # by level and digest of tables

    def __call__(self, level: str, model: str) -> Codec | None:
        """The codec that writes a model's KV at a level; None for a level that is none, or without tables."""
        plain = TABLELESS(level, model)
        if plain is not None or level not in LEVEL_NAMES:
            return plain
        return self._codec(level, self.tables(model))

    def packed(self, level: str, tables: str) -> Codec | None:
        """The codec of what was packed with the tables of this digest, wherever these are kept."""
        return self._codec(level, self._once(tables, lambda: self._by_digest(tables)))

    def tables(self, model: str) -> CodecTables | None:
        """The tables that a model's KV is written with, as the catalog has them."""
        return self._once(model, lambda: self._of_model(model))

    def learn(self, model: str, tables: CodecTables) -> None:
        """Write a model's KV with these from now on, here and in later processes on this store."""
        with self._lock:
            self._known |= dict.fromkeys((model, tables.digest), (tables, self._clock()))
        self._catalog.put(f"tables-{tables.digest}", tables.as_dict())
        self._catalog.put(f"codec-{model}", {"tables": tables.digest})

    def share(self, tables: CodecTables) -> None:
        """Keep these in every slow tier that has not got them, pinned; what cannot be kept is no loss here."""
        key, value = _key(tables.digest), json.dumps(tables.as_dict()).encode()
        for tier in self.tiers:
            if tier.slow and key not in tier.entries([key]) and tier.write(key, *as_entry(tables.digest, value)):
                tier.pin([key], True)

    # inside

    def _codec(self, level: str, tables: CodecTables | None) -> Codec | None:
        if tables is None:
            return None
        with self._lock:
            if (level, tables.digest) not in self._codecs:
                self._codecs[level, tables.digest] = codec_for(level, tables)
            return self._codecs[level, tables.digest]

    def _once(self, name: str, find: Callable[[], CodecTables | None]) -> CodecTables | None:
        """What is known under a name; what is not is looked for, and again only after a while."""
        with self._lock:
            found, asked_s = self._known.get(name, (None, float("-inf")))
        if found is not None or self._clock() - asked_s < TABLES_RECHECK_S:
            return found
        found = find()
        with self._lock:
            self._known[name] = found, self._clock()
        return found

    def _of_model(self, model: str) -> CodecTables | None:
        kept = self._catalog.get(f"codec-{model}") or {}
        return self._by_digest(str(kept["tables"])) if "tables" in kept else None

    def _by_digest(self, tables: str) -> CodecTables | None:
        """Tables from the catalog, else from the first slow tier that has them whole."""
        kept = self._catalog.get(f"tables-{tables}")
        for found in (kept, *(_read(tier, tables) for tier in self.tiers if kept is None and tier.slow)):
            known = CodecTables.from_dict(found) if found is not None else None
            if known is not None and known.digest == tables:
                return known
        return None


def wants_tables(settings: Settings) -> bool:
    """Whether a tier is, or may be, written at a level that needs its model's tables."""
    levels = {level for each in settings.written.values() for level in each}
    return any(level == AUTO_LEVEL or TABLELESS(level, "") is None for level in levels)


def _key(tables: str) -> ChunkKey:
    return ChunkKey(OWNER, digest("tables", tables))


def _read(tier: Tier, tables: str) -> object:
    """What a tier keeps as these tables, None for nothing or what cannot be read."""
    value = value_of(tier, _key(tables))
    try:
        return parsed(value) if value is not None else None
    except ValueError:
        return None
