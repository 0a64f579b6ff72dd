"""Quotas of tenants in a shared store. Over its quota, a tenant's oldest entries, texts and
sessions are deleted.

A tier's capacity bounds all tenants together; without quotas one tenant could evict what the others
keep.
"""

from __future__ import annotations

from ragfuse.engine.engine import Engine
from ragfuse.store import Tier
from ragfuse.types.keys import ChunkKey

QUOTA_MARGIN = 0.05
"""Share of a quota that is freed beyond what is needed, so that not every new text causes a search
for the oldest.
"""


def limits_of(engine: Engine, parts: int) -> dict[str, int]:
    """Return a tenant's limits by kind: known texts, stored sessions, and bytes in a folder of KV
    where these are limited.

    Args:
        engine: The tenant's engine.
        parts: The number of tenants, among whom a tier is divided unless a setting says otherwise.
    """
    settings = engine.settings
    nbytes = [limit for tier in _capped(engine) if (limit := _byte_limit(engine, tier, parts))]
    return {
        **({"bytes": min(nbytes)} if nbytes else {}),
        "texts": settings.serve_tenant_texts,
        "sessions": settings.serve_tenant_sessions,
    }


def enforce(engine: Engine, parts: int) -> None:
    """Delete the oldest of what a tenant has over its limits (`limits_of`), but for pinned entries.
    It may take long.
    """
    digest, catalog, settings = engine.digest, engine.catalog.strict, engine.settings
    for tier in _capped(engine):
        entries = [entry for entry in tier.list() if entry.key.model == digest]
        limit, doomed = _byte_limit(engine, tier, parts), list[ChunkKey]()
        excess = _excess(sum(entry.nbytes for entry in entries), limit) if limit else 0
        for entry in sorted(entries, key=lambda entry: entry.last_used):
            if excess > 0 and not entry.pinned:
                doomed.append(entry.key)
                excess -= entry.nbytes
        engine.store.forget(doomed, tier.name)
    if excess := _excess(catalog.count_texts(digest), settings.serve_tenant_texts):
        engine.forget({known.text for known in catalog.texts(digest, excess)})
    sessions = catalog.count_sessions(digest)
    if excess := _excess(sessions, settings.serve_tenant_sessions):
        engine.sessions.keep_latest(sessions - excess)


def _capped(engine: Engine) -> list[Tier]:
    """Return the tiers that outlive the process and have a capacity; others limit themselves."""
    return [tier for tier in engine.store.tiers if tier.slow and not tier.remote]


def _byte_limit(engine: Engine, tier: Tier, parts: int) -> int | None:
    """Return the bytes that a tenant may keep in a tier; None: no limit."""
    share = tier.capacity // parts if parts > 1 else None
    return engine.settings.serve_tenant_bytes or share


def _excess(n: int, limit: int) -> int:
    """Return how much of `n` is to be deleted: where it is beyond the limit, a margin more."""
    return n - limit + int(QUOTA_MARGIN * limit) if n > limit else 0
