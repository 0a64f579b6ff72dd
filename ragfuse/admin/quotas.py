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
from ragfuse.store import KVStore
from ragfuse.store.catalog import Catalog, CatalogQueries
from ragfuse.types.kv import Entry

QUOTA_MARGIN = 0.05
"""Share of a quota that is freed beyond what is needed, so that not every new text causes a search for the oldest."""
RECOUNT_S = 30.0
"""Seconds between two counts of a tier's entries while the tenant cannot be over its quota."""


@dataclass(frozen=True)
class Quota:
    """The limits of one tenant; None: no limit.

    Args:
        nbytes: Bytes in each tier that outlives a process.
        texts: Known texts in the catalog.
        sessions: Stored sessions.
        parts: Without `nbytes`, the tenant may keep 1 / `parts` of a tier's capacity; 1: no limit.
    """

    nbytes: int | None = None
    texts: int | None = None
    sessions: int | None = None
    parts: int = 1

    def most_in(self, capacity: int) -> int | None:
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
    """The part of an engine that quotas need: one tenant's store, catalog and sessions."""

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


def written_use(catalog: CatalogQueries, digest: str) -> tuple[int, int]:
    """Return a tenant's numbers of texts and sessions in the catalog; StoreError where it cannot be read."""
    return catalog.count_texts(digest), catalog.sessions.count(digest)


class QuotaKeeper:
    """Keeps one tenant within its quota. `keep` may take long; reading `use` and `evicted` never waits.

    Args:
        holder: The tenant's engine.
        quota: Its limits.
        clock: A monotonic clock, in seconds.

    Attributes:
        use: What the tenant keeps, as last counted.
        evicted: Numbers deleted so far: entries under "bytes", "texts", "sessions".
    """

    def __init__(self, holder: QuotaOwner, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self.quota, self.use, self.evicted = quota, TenantUse(), Counter[str]()
        self._holder, self._clock, self._lock = holder, clock, threading.Lock()
        self._counted: dict[str, tuple[int, float, int]] = {}  # by tier: its bytes and the time then, and the tenant's

    def keep(self) -> TenantUse:
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
        bounds = [self.quota.most_in(tier.capacity) for tier in self._holder.store.tiers if tier.slow]
        nbytes = min((most for most in bounds if most is not None), default=None)
        told = {"bytes": nbytes, "texts": self.quota.texts, "sessions": self.quota.sessions}
        return {kind: most for kind, most in told.items() if most is not None}

    def _texts(self) -> int:
        catalog, most = self._holder.catalog.strict, self.quota.texts
        n = written_use(catalog, self._holder.digest)[0]
        if most is None or n <= most:
            return n
        oldest = catalog.oldest_texts(self._holder.digest, n - _low(most))
        self._holder.forget({known.text for known in oldest})
        left = catalog.count_texts(self._holder.digest)
        self.evicted["texts"] += n - left
        return left

    def _sessions(self) -> int:
        catalog, most = self._holder.catalog.strict, self.quota.sessions
        n = written_use(catalog, self._holder.digest)[1]
        if most is None or n <= most:
            return n
        self._holder.sessions.keep_latest(_low(most))
        left = catalog.sessions.count(self._holder.digest)
        self.evicted["sessions"] += n - left
        return left

    def _nbytes(self) -> dict[str, int]:
        """Delete the oldest entries over the quota; return the tenant's bytes by tier afterwards."""
        found = {}
        for tier in self._holder.store.tiers:
            if not tier.slow:
                continue
            all_bytes, counted = tier.nbytes, self._counted.get(tier.name)
            most = self.quota.most_in(tier.capacity)
            if counted is None or (all_bytes != counted[0] and self._may_be_over(all_bytes, counted, most)):
                digest = self._holder.digest
                mine = [entry for entry in tier.entries().values() if entry.key.model == digest]
                counted = all_bytes, self._clock(), self._shrunk(tier.name, mine, most)
                self._counted[tier.name] = counted
            found[tier.name] = counted[2]
        return found

    def _may_be_over(self, all_bytes: int, counted: tuple[int, float, int], most: int | None) -> bool:
        """Return whether a recount is due: the tenant may be over its quota, or the last count is old."""
        before, when_s, mine = counted
        grown = most is not None and mine + max(0, all_bytes - before) > most
        return grown or self._clock() - when_s >= RECOUNT_S

    def _shrunk(self, tier: str, mine: list[Entry], most: int | None) -> int:
        """Delete a tenant's oldest unpinned entries over `most` in a tier; return the bytes that are left."""
        nbytes = sum(entry.nbytes for entry in mine)
        if most is None or nbytes <= most:
            return nbytes
        doomed = []
        for entry in sorted((entry for entry in mine if not entry.pinned), key=lambda entry: entry.last_used):
            if nbytes <= _low(most):
                break
            doomed.append(entry.key)
            nbytes -= entry.nbytes
        left = self._holder.store.drop(doomed, tier).get(tier, set())
        self.evicted["bytes"] += len(doomed) - len(left)
        return nbytes + sum(entry.nbytes for entry in mine if entry.key in left)


def _low(most: int) -> int:
    """Return the amount to shrink to once `most` is exceeded."""
    return most - int(QUOTA_MARGIN * most)
