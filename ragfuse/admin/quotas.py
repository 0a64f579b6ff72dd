"""Quotas of tenants in a shared store. Over its quota, a tenant's oldest entries, texts and sessions are deleted.

A tier's capacity bounds all tenants together; without quotas one tenant could evict what the others keep.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ragfuse.errors import StoreError
from ragfuse.sessions.session_store import SessionStore
from ragfuse.store import KVStore, Tier
from ragfuse.store.catalog import Catalog, CatalogQueries
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

QUOTA_MARGIN = 0.05
"""Share of a quota that is freed beyond what is needed, so that not every new text causes a search for the oldest."""
RECOUNT_S = 30.0
"""Seconds between two counts of a tier's entries while the tenant cannot be over its quota."""


@dataclass(frozen=True)
class Quota:
    """The limits of one tenant; None: no limit.

    Args:
        nbytes: Bytes in each folder of KV; Redis and object stores limit themselves.
        texts: Known texts in the catalog.
        sessions: Stored sessions.
        parts: Without `nbytes`, the tenant may keep 1 / `parts` of a tier's capacity; 1: no limit.
    """

    nbytes: int | None = None
    texts: int | None = None
    sessions: int | None = None
    parts: int = 1

    def byte_limit(self, capacity: int) -> int | None:
        """Return the bytes that the tenant may keep in a tier of this capacity; None: no limit."""
        return self.nbytes if self.nbytes is not None else capacity // self.parts if self.parts > 1 else None


@dataclass(frozen=True)
class TenantUse:
    """What one tenant keeps: bytes by tier, known texts, stored sessions."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    texts: int = 0
    sessions: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain JSON types."""
        return {"nbytes": dict(self.nbytes), "texts": self.texts, "sessions": self.sessions}


class QuotaOwner(Protocol):
    """The part of an engine that quotas need: the store, catalog and sessions of one tenant."""

    store: KVStore
    catalog: Catalog

    @property
    def sessions(self) -> SessionStore:
        """The tenant's stored sessions."""
        ...

    @property
    def digest(self) -> str:
        """The digest of model and tenant that is part of every key."""
        ...

    def forget(self, texts: Iterable[str]) -> int:
        """Delete these chunks, in every tier and in the catalog."""
        ...


def catalog_use(catalog: CatalogQueries, digest: str) -> tuple[int, int]:
    """Return how many texts and sessions of a tenant the catalog has; StoreError where it cannot be read."""
    return catalog.count_texts(digest), catalog.sessions.count(digest)


class QuotaKeeper:
    """Keeps one tenant within its quota. `enforce` may take long; reading `use` and `evicted` never waits.

    Args:
        owner: The tenant's engine.
        quota: Its limits.
        clock: A monotonic clock, in seconds.

    Attributes:
        use: What the tenant keeps, as last counted.
        evicted: Numbers deleted so far: entries under "bytes", "texts", "sessions".
    """

    def __init__(self, owner: QuotaOwner, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self.quota, self.use, self.evicted = quota, TenantUse(), Counter[str]()
        self._owner, self._clock, self._lock = owner, clock, threading.Lock()
        self._counts: dict[
            str, tuple[int, float, int]
        ] = {}  # tier -> (its bytes, time of the count in seconds, the tenant's bytes)

    def enforce(self) -> TenantUse:
        """Count what the tenant has, delete the oldest over the quota, and return what is left.

        A catalog or tier that does not answer is skipped until the next call.
        """
        with self._lock:
            try:
                texts, sessions = self._texts(), self._sessions()
            except StoreError:
                texts, sessions = self.use.texts, self.use.sessions
            self.use = TenantUse(self._nbytes(), texts, sessions)
            return self.use

    def limits(self) -> dict[str, int]:
        """Return the tenant's limits by kind, without kinds that have none; for bytes, the smallest over all tiers."""
        byte_limits = [self.quota.byte_limit(tier.capacity) for tier in self._capped()]
        nbytes = min((limit for limit in byte_limits if limit is not None), default=None)
        limits = {"bytes": nbytes, "texts": self.quota.texts, "sessions": self.quota.sessions}
        return {kind: limit for kind, limit in limits.items() if limit is not None}

    def _texts(self) -> int:
        catalog, limit = self._owner.catalog.strict, self.quota.texts
        n = catalog_use(catalog, self._owner.digest)[0]
        if limit is None or n <= limit:
            return n
        oldest = catalog.texts(self._owner.digest, n - _target(limit))
        self._owner.forget({known.text for known in oldest})
        remaining = catalog.count_texts(self._owner.digest)
        self.evicted["texts"] += n - remaining
        return remaining

    def _sessions(self) -> int:
        catalog, limit = self._owner.catalog.strict, self.quota.sessions
        n = catalog_use(catalog, self._owner.digest)[1]
        if limit is None or n <= limit:
            return n
        self._owner.sessions.keep_latest(_target(limit))
        remaining = catalog.sessions.count(self._owner.digest)
        self.evicted["sessions"] += n - remaining
        return remaining

    def _nbytes(self) -> dict[str, int]:
        """Delete the oldest entries over the quota; return the tenant's bytes by tier afterwards."""
        found = {}
        for tier in self._capped():
            all_bytes, count = tier.nbytes, self._counts.get(tier.name)
            limit = self.quota.byte_limit(tier.capacity)
            if count is None or (all_bytes != count[0] and self._may_be_over(all_bytes, count, limit)):
                digest = self._owner.digest
                entries = [entry for entry in tier.list() if entry.key.model == digest]
                count = all_bytes, self._clock(), self._shrink(tier.name, entries, limit)
                self._counts[tier.name] = count
            found[tier.name] = count[2]
        return found

    def _capped(self) -> list[Tier]:
        """Return the tiers that outlive the process and have a capacity; others limit themselves."""
        return [tier for tier in self._owner.store.tiers if tier.slow and not tier.remote]

    def _may_be_over(self, all_bytes: int, count: tuple[int, float, int], limit: int | None) -> bool:
        """Return whether a recount is due: the tenant may be over its quota, or the last count is old."""
        before, when_s, tenant_bytes = count
        grown = limit is not None and tenant_bytes + max(0, all_bytes - before) > limit
        return grown or self._clock() - when_s >= RECOUNT_S

    def _shrink(self, tier: str, entries: list[Entry], limit: int | None) -> int:
        """Delete the oldest of a tenant's unpinned `entries` over `limit` in a tier; return the bytes that are left."""
        nbytes = sum(entry.nbytes for entry in entries)
        if limit is None or nbytes <= limit:
            return nbytes
        to_delete = list[ChunkKey]()
        excess = nbytes - _target(limit)
        for entry in sorted((entry for entry in entries if not entry.pinned), key=lambda entry: entry.last_used):
            if excess <= 0:
                break
            to_delete.append(entry.key)
            excess -= entry.nbytes
        done = self._owner.store.forget(to_delete, tier)
        self.evicted["bytes"] += len(done.entries)
        return nbytes - done.nbytes


def _target(limit: int) -> int:
    """Return the amount to shrink to once `limit` is exceeded."""
    return limit - int(QUOTA_MARGIN * limit)
