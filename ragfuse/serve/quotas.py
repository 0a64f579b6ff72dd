"""Quotas of tenants in a shared store. Over its quota, a tenant's oldest entries, texts and
sessions are deleted.

A tier's capacity bounds all tenants together; without quotas one tenant could evict what the others
keep.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ragfuse.engine.engine import Engine
from ragfuse.errors import StoreError
from ragfuse.store import Tier
from ragfuse.types.keys import ChunkKey

QUOTA_MARGIN = 0.05
"""Share of a quota that is freed beyond what is needed, so that not every new text causes a search
for the oldest.
"""


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
        share = capacity // self.parts if self.parts > 1 else None
        return share if self.nbytes is None else self.nbytes


@dataclass(frozen=True)
class TenantUse:
    """What one tenant keeps: bytes by tier, known texts, stored sessions."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    texts: int = 0
    sessions: int = 0


class QuotaKeeper:
    """Keeps one tenant within its quota. `enforce` may take long; reading `use` and `evicted` never
    waits.

    Args:
        owner: The tenant's engine.
        quota: Its limits.

    Attributes:
        use: What the tenant keeps, as last counted.
        evicted: Numbers deleted so far: entries under "bytes", "texts", "sessions".
    """

    def __init__(self, owner: Engine, quota: Quota) -> None:
        self.quota, self.use = quota, TenantUse()
        self.evicted = Counter(bytes=0, texts=0, sessions=0)
        self._owner, self._lock = owner, threading.Lock()

    def enforce(self) -> TenantUse:
        """Count what the tenant has, delete the oldest over the quota, and return what is left.

        A catalog or tier that does not answer is skipped until the next call.
        """
        owner, catalog, digest = self._owner, self._owner.catalog.strict, self._owner.digest
        with self._lock:
            use = self.use
            with suppress(StoreError):
                if excess := _excess(catalog.count_texts(digest), self.quota.texts):
                    doomed = {known.text for known in catalog.texts(digest, excess)}
                    owner.forget(doomed)
                    self.evicted["texts"] += len(doomed)
                sessions = catalog.count_sessions(digest)
                if excess := _excess(sessions, self.quota.sessions):
                    gone = owner.sessions.keep_latest(sessions - excess)
                    self.evicted["sessions"] += gone.sessions
                use = TenantUse(
                    texts=catalog.count_texts(digest), sessions=catalog.count_sessions(digest)
                )
            self.use = replace(
                use, nbytes={tier.name: self._bytes_in(tier) for tier in self._capped()}
            )
            return self.use

    def limits(self) -> dict[str, int]:
        """Return the tenant's limits by kind, without kinds that have none; for bytes, the smallest
        over all tiers.
        """
        byte_limits = [self.quota.byte_limit(tier.capacity) for tier in self._capped()]
        nbytes = min((limit for limit in byte_limits if limit is not None), default=None)
        limits = {"bytes": nbytes, "texts": self.quota.texts, "sessions": self.quota.sessions}
        return {kind: limit for kind, limit in limits.items() if limit is not None}

    def _capped(self) -> list[Tier]:
        """Return the tiers that outlive the process and have a capacity; others limit
        themselves.
        """
        return [tier for tier in self._owner.store.tiers if tier.slow and not tier.remote]

    def _bytes_in(self, tier: Tier) -> int:
        """Delete the oldest of the tenant's unpinned entries over its quota; return the bytes that
        are left.
        """
        entries = [entry for entry in tier.list() if entry.key.model == self._owner.digest]
        nbytes = sum(entry.nbytes for entry in entries)
        doomed, excess = list[ChunkKey](), _excess(nbytes, self.quota.byte_limit(tier.capacity))
        for entry in sorted(entries, key=lambda entry: entry.last_used):
            if excess > 0 and not entry.pinned:
                doomed.append(entry.key)
                excess -= entry.nbytes
        done = self._owner.store.forget(doomed, tier.name)
        self.evicted["bytes"] += len(done.entries)
        return nbytes - done.nbytes


def _excess(n: int, limit: int | None) -> int:
    """Return how much of `n` is to be deleted: where it is beyond the limit, a margin more."""
    return 0 if limit is None or n <= limit else n - limit + int(QUOTA_MARGIN * limit)
