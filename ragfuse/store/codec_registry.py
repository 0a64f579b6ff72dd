"""The codecs of models: finds the codec tables that their KV was encoded with.

A model's tables are profiled once, from text that comes with ragfuse, and saved in the store's
catalog. A copy is saved in every slow tier under the tables' digest, which each encoded layer
names, so that another machine that shares the tier can decode what this one encoded.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence

from ragfuse.codec import Codec, CodecTables, codec_for
from ragfuse.settings import AUTO_LEVEL, Settings
from ragfuse.store import Tier
from ragfuse.store.catalog import Catalog
from ragfuse.store.levels import tableless
from ragfuse.store.named import as_entry, value_of
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.levels import LEVEL_NAMES

log = logging.getLogger("ragfuse.store")

TABLES_RECHECK_S = 60.0
"""Seconds until missing tables are looked for again in the catalog and the tiers."""
OWNER = digest("codec tables")
"""The `ChunkKey.model` of tables in a tier, in place of a model's digest."""


class CodecRegistry:
    """The codecs of a store, by level and model digest, or by level and tables. Threads may share
    it.

    Args:
        catalog: The store's catalog.
        tiers: The store's tiers; the slow ones keep copies of tables. May be set later, once the
            store is open.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Sequence[Tier] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog, self.tiers, self._clock = catalog, tiers, clock
        self._lock = threading.Lock()
        # by model or digest, and when it was asked for
        self._known: dict[str, tuple[CodecTables | None, float]] = {}
        self._codecs: dict[tuple[str, str], Codec] = {}  # by level and digest of tables

    def __call__(self, level: str, model: str, tables: str = "") -> Codec | None:
        """Return the codec of a level (`Codecs`), with tables from the catalog or a tier; None if
        there is none.
        """
        plain = tableless(level, model)
        if plain is not None or level not in LEVEL_NAMES:
            return plain
        known = (
            self._cached(tables, lambda: self._by_digest(tables)) if tables else self.tables(model)
        )
        if known is None:
            return None
        with self._lock:
            if (level, known.digest) not in self._codecs:
                self._codecs[level, known.digest] = codec_for(level, known)
            return self._codecs[level, known.digest]

    def tables(self, model: str) -> CodecTables | None:
        """Return the tables that a model's KV is written with, or None if it has not been
        profiled.
        """
        return self._cached(model, lambda: self._of_model(model))

    def learn(self, model: str, tables: CodecTables) -> None:
        """Set the tables that a model's KV is written with from now on, here and in later processes
        on this store.
        """
        with self._lock:
            self._known |= dict.fromkeys((model, tables.digest), (tables, self._clock()))
        self._catalog.put(f"tables-{tables.digest}", tables.as_dict())
        self._catalog.put(f"codec-{model}", {"tables": tables.digest})

    def share(self, tables: CodecTables) -> None:
        """Save tables, pinned, in every slow tier that lacks them. Failures are ignored: the
        catalog has them, too.
        """
        key, value = _key(tables.digest), json.dumps(tables.as_dict()).encode()
        for tier in self.tiers:
            if tier.slow and key not in tier.stat([key]) and tier.put(key, *as_entry(value)):
                tier.pin([key], True)

    # inside

    def _cached(self, name: str, find: Callable[[], CodecTables | None]) -> CodecTables | None:
        """Return the cached tables of a name; look for unknown ones, but again only after
        `TABLES_RECHECK_S`.
        """
        with self._lock:
            found, searched_s = self._known.get(name, (None, float("-inf")))
        if found is not None or self._clock() - searched_s < TABLES_RECHECK_S:
            return found
        found = find()
        with self._lock:
            self._known[name] = found, self._clock()
        return found

    def _of_model(self, model: str) -> CodecTables | None:
        profile = self._catalog.get(f"codec-{model}") or {}
        return self._by_digest(str(profile["tables"])) if "tables" in profile else None

    def _by_digest(self, tables: str) -> CodecTables | None:
        """Return tables from the catalog, else from the first slow tier that has them undamaged."""
        profile = self._catalog.get(f"tables-{tables}")
        for found in (
            profile,
            *(_read(tier, tables) for tier in self.tiers if profile is None and tier.slow),
        ):
            parsed_tables = CodecTables.from_dict(found) if found is not None else None
            if parsed_tables is not None and parsed_tables.digest == tables:
                return parsed_tables
        return None


def wants_tables(settings: Settings) -> bool:
    """Return whether the settings have a tier that is, or may be, written at a level that needs
    codec tables.
    """
    levels = {level for each in settings.written.values() for level in each}
    return any(level == AUTO_LEVEL or tableless(level, "") is None for level in levels)


def _key(tables: str) -> ChunkKey:
    return ChunkKey(OWNER, digest("tables", tables))


def _read(tier: Tier, tables: str) -> object:
    """Return the parsed JSON of tables in a tier, or None if there is none or it is damaged."""
    value = value_of(tier, _key(tables))
    try:
        return json.loads(value) if value is not None else None
    except ValueError:
        return None
