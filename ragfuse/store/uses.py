"""Report which chunks were used in one tier to the other tiers, rarely and in the background.

Without this, a chunk that is always read from memory would look unused in the other tiers, and be evicted there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

from cachetools import LRUCache

from ragfuse.store.tier import Tier, Touches
from ragfuse.types.keys import ChunkKey

_REMEMBERED = 1 << 14

Submit = Callable[[str, Callable[[], object]], bool]
"""Queues a job in the background writer of the named tier; returns False if it is dropped."""


class Uses:
    """Reports of chunk uses to all tiers that were not read. At most one report job waits per tier."""

    def __init__(self, tiers: Sequence[Tier], submit: Submit) -> None:
        self._tiers = tuple(tier for tier in tiers if isinstance(tier, Touches))
        self._submit = submit
        self._lock = Lock()
        self._reported_at: LRUCache[ChunkKey, float] = LRUCache(_REMEMBERED)
        self._pending: dict[str, dict[ChunkKey, None]] = {tier.name: {} for tier in self._tiers}

    def note(self, key: ChunkKey, source: str, now: float, every_s: float) -> None:
        """Note that a chunk was read from the tier `source`, and queue a report to the other tiers.

        Args:
            key: The chunk.
            source: Name of the tier that it was read from.
            now: The time in seconds since the epoch.
            every_s: No report is queued if the last one of this chunk is less than this many seconds ago.
        """
        others = [tier for tier in self._tiers if tier.name != source]
        with self._lock:
            if not others or 0 <= now - self._reported_at.get(key, -every_s) < every_s:
                return
            self._reported_at[key] = now
            idle = [tier for tier in others if not self._pending[tier.name]]
            for tier in others:
                self._pending[tier.name][key] = None
        for tier in idle:
            if not self._submit(tier.name, partial(self._report, tier)):
                self._forget(tier)

    def _report(self, tier: Touches) -> None:
        tier.touch(self._take(tier))

    def _forget(self, tier: Touches) -> None:
        """Forget the dropped reports of a tier, so that the next use of these chunks is reported."""
        for key in self._take(tier):
            with self._lock:
                self._reported_at.pop(key, None)

    def _take(self, tier: Touches) -> dict[ChunkKey, None]:
        with self._lock:
            pending, self._pending[tier.name] = self._pending[tier.name], {}
            return pending
