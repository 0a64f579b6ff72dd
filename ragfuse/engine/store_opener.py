"""The store that settings describe, with the policies that decide what it drops."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ragfuse.plan.evict import Evict, expired, expired_first, lru
from ragfuse.settings import Settings
from ragfuse.store import KVStore, open_store
from ragfuse.store.levels import TABLELESS, Codecs


def open_kept(
    settings: Settings, clock: Callable[[], float] = time.time, codecs: Codecs = TABLELESS, evict: Evict = lru
) -> KVStore:
    """The store that the settings describe, with `ttl_s`. evict: the policy of memory and disk; in tiers behind them,
    which other machines may share, what was used longest ago goes first."""
    if settings.ttl_s is None:
        return open_store(settings, evict, codecs, lru)
    own, shared = (expired_first(policy, settings.ttl_s, clock) for policy in (evict, lru))
    store = open_store(settings, own, codecs, shared)
    store.expired = partial(expired, ttl_s=settings.ttl_s)
    store.tell_every_s = min(store.tell_every_s, settings.ttl_s / 8)
    return store
