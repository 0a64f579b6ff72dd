"""Opens the store and the catalog that settings describe, with their eviction policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ragfuse.errors import SettingsError
from ragfuse.plan.evict import ConversationEvictor, Evict, expired, lru
from ragfuse.settings import Settings
from ragfuse.store import CatalogFile, KVStore, open_store
from ragfuse.store.catalog import Catalog
from ragfuse.store.levels import Codecs, tableless


def open_catalog(settings: Settings, store: KVStore | None) -> Catalog:
    """Return the catalog of the store that settings describe.

    The catalog keeps nothing where `store` is given (open already), or where settings leave no
    bytes for the disk.
    """
    if store is not None or not settings.disk_bytes:
        return Catalog()
    return Catalog(CatalogFile(settings.store_path, settings.shared_with))


def opened(settings: Settings, store: KVStore | None, codecs: Codecs, evict: Evict) -> KVStore:
    """Return `store` if it is given, else open the one that settings describe.

    Raises:
        SettingsError: `store` is not a KVStore.
    """
    if not isinstance(store, KVStore | None):
        raise SettingsError(
            f"store= takes an open KVStore, found {store!r:.60}. Give a folder as"
            " Settings(store=...)."
        )
    return store if store is not None else open_kept(settings, codecs=codecs, evict=evict)


def open_kept(
    settings: Settings,
    clock: Callable[[], float] = time.time,
    codecs: Codecs = tableless,
    evict: Evict = lru,
) -> KVStore:
    """Open the store that settings describe, with expiry after `ttl_s` seconds where that is set.

    Args:
        settings: The settings.
        clock: Returns the time in seconds.
        codecs: The codecs of its levels.
        evict: The eviction policy of the tiers that do not evict by themselves.
    """
    if settings.ttl_s is None:
        return open_store(settings, evict, codecs)
    if isinstance(evict, ConversationEvictor):  # `lru` drops what is expired first anyway
        evict = replace(evict, ttl_s=settings.ttl_s, now=clock)
    store = open_store(settings, evict, codecs)
    store.expired = partial(expired, ttl_s=settings.ttl_s)
    store.report_every_s = min(store.report_every_s, settings.ttl_s / 8)
    return store
