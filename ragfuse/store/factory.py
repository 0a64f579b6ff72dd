"""Open the store and the catalog that the settings describe, or a single tier by its URL."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from ragfuse.errors import StoreError
from ragfuse.plan.evict import Evictor, lru
from ragfuse.settings import Settings
from ragfuse.store.catalog import Catalog
from ragfuse.store.memory import MemoryTier
from ragfuse.store.store import KVStore
from ragfuse.store.tier import Tier, shown
from ragfuse.types.choices import kind_of_scheme


def open_catalog(settings: Settings) -> Catalog:
    """Open the catalog in `store_path`. If `disk_bytes` is 0, the catalog saves nothing."""
    return Catalog(settings.store_path if settings.disk_bytes else None)


def kept_places(settings: Settings) -> list[tuple[str, Settings]]:
    """Return (folder or URL, settings) per persistent tier; `tier_bytes` is the tier's capacity."""
    disk = settings.model_copy(update={"tier_bytes": settings.disk_bytes})
    own = [(str(settings.store_path), disk)] if settings.disk_bytes else []
    return [*own, *((url, settings) for url in settings.tiers)]


def open_store(settings: Settings, evict: Evictor = lru) -> KVStore:
    """Open the store that the settings describe: memory, disk, then `settings.tiers` in order.

    A tier of 0 bytes is left out. If the model is on a GPU, the first tier is in GPU memory, and
    host memory is pinned.

    Args:
        settings: Sizes, paths, URLs and codec levels.
        evict: The eviction policy of tiers in memory and in folders. Redis and object stores evict
            by themselves.

    Raises:
        StoreError: A tier cannot be used, or two tiers have the same folder or URL.
    """
    places = [
        url.rstrip("/") if "://" in url else str(Path(url).expanduser().resolve())
        for url, _ in kept_places(settings)
    ]
    twice = next((shown(place) for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise StoreError(
            f"Two tiers use '{twice}' and would delete each other's entries. Remove one tier."
        )
    opened: list[Tier] = []
    try:
        on_gpu = settings.device.startswith("cuda")
        if on_gpu and settings.gpu_bytes:
            opened.append(MemoryTier(settings.gpu_bytes, evict, device=settings.device, name="gpu"))
        if settings.memory_bytes:
            opened.append(MemoryTier(settings.memory_bytes, evict, pin_memory=on_gpu))
        for url, own in kept_places(settings):
            opened.append(open_tier(url, own, evict, [tier.name for tier in opened]))
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    levels, queue = settings.written, settings.writer_queue
    return KVStore(opened, levels=levels, writer_queue=queue, ttl_s=settings.ttl_s)


def open_tier(
    url: str, settings: Settings, evict: Evictor, names_in_use: Collection[str] = ()
) -> Tier:
    """Open the tier at a URL or in a folder.

    Args:
        url: A folder, or a URL such as `redis://...` or `s3://...`.
        settings: Settings with the capacity and timeouts of the tier.
        evict: The eviction policy.
        names_in_use: Names of the tiers that are already open. The new tier is named after its kind
            (disk, redis, objects). If a tier of this kind is open, a number is appended.

    Raises:
        StoreError: `url` is neither a folder nor a URL, or the tier cannot be opened.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    if not url.strip() or (scheme is None and "://" in url):
        raise StoreError(
            f"A tier is a folder or a URL such as redis://, s3:// or file://, found '{shown(url)}'."
        )
    kind = kind_of_scheme(scheme.group(1).lower() if scheme is not None else "")
    module, _, tier_class = kind.home.partition(":")
    n_before = sum(name.partition("-")[0] == kind.name for name in names_in_use)
    name = f"{kind.name}-{n_before + 1}" if n_before else kind.name
    kind_of_tier: Any = getattr(import_module(module), tier_class)
    tier: Tier = kind_of_tier.open(url, settings, evict, name)
    return tier
