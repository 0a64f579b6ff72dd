"""What a tenant may keep of a shared store, what it keeps, and what of it goes first: what is oldest.

A tier's capacity bounds all tenants together; without quotas one of them could push out what the others keep.
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
"""Share of a quota that is freed beyond what is needed, so that not every new text looks for an oldest one."""
RECOUNT_S = 30.0
"""Seconds for which a tier's entries are not counted again while nothing can be over its quota."""


@dataclass(frozen=True)
class Quota:
    """What one tenant may keep: bytes in each tier that outlives a process, known texts, sessions; None: no bound.

    parts: of a tier's capacity it may keep one, where bytes are not told and there are several.
    """

    nbytes: int | None = None
    texts: int | None = None
    sessions: int | None = None
    parts: int = 1

    def most_in(self, capacity: int) -> int | None:
        """Bytes that it may keep in a tier of this capacity."""
        return self.nbytes if self.nbytes is not None else capacity // self.parts if self.parts > 1 else None


@dataclass(frozen=True)
class TenantUse:
    """What one tenant keeps: bytes by tier, known texts, sessions that are written down."""

    nbytes: Mapping[str, int] = field(default_factory=dict)
    texts: int = 0
    sessions: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"nbytes": dict(self.nbytes), "texts": self.texts, "sessions": self.sessions}


class QuotaOwner(Protocol):
    """Whoever keeps things for one tenant: an engine."""

    store: KVStore
    catalog: Catalog

    @property
    def sessions(self) -> SessionStore:
        """The sessions that it keeps."""
        ...

    @property
    def digest(self) -> str:
        """What stands for model and tenant in every key."""
        ...

    def forget(self, texts: Iterable[str]) -> int:
        """Drop these chunks from everywhere."""
        ...


def written_use(catalog: CatalogQueries, digest: str) -> tuple[int, int]:
    """Texts and sessions of a tenant that are written down; StoreError where the catalog cannot be read."""
    return catalog.count_texts(digest), catalog.sessions.count(digest)


class QuotaKeeper:
    """Keeps one engine's tenant within its quota. `keep` may take long; `use` and `evicted` are told at once.

    evicted: by kind (bytes, texts, sessions), how many entries, texts and sessions went. clock: seconds, never
    backwards.
    """

    def __init__(self, holder: QuotaOwner, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self.quota, self.use, self.evicted = quota, TenantUse(), Counter[str]()
        self._holder, self._clock, self._lock = holder, clock, threading.Lock()
        self._counted: dict[str, tuple[int, float, int]] = {}  # by tier: its bytes and the time then, and the tenant's

    def keep(self) -> TenantUse:
        """Count what the tenant has, drop the oldest of what is too much, and return what is left.

        A catalog or tier that does not answer now is looked at the next time.
        """
        with self._lock:
            try:
                texts, sessions = self._texts(), self._sessions()
            except StoreError:
                texts, sessions = self.use.texts, self.use.sessions
            self.use = TenantUse(self._nbytes(), texts, sessions)
            return self.use

    def limits(self) -> dict[str, int]:
        """What the tenant may keep, as far as there is a bound; of bytes, in the tier where it is least."""
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
        """Bytes by tier, after what is oldest has gone."""
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
        """Whether the tenant may have too much since it was counted, or that was long ago."""
        before, when_s, mine = counted
        grown = most is not None and mine + max(0, all_bytes - before) > most
        return grown or self._clock() - when_s >= RECOUNT_S

    def _shrunk(self, tier: str, mine: list[Entry], most: int | None) -> int:
        """Bytes of a tenant's entries in a tier after the oldest have gone that are too much; pinned ones stay."""
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
    """What is left of so many when some have to go."""
    return most - int(QUOTA_MARGIN * most)
