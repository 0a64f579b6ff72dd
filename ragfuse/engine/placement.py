"""The choice of tiers for new chunks, and promotion of often used chunks, by the timings of this machine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import islice

from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.hf.model import HFModel
from ragfuse.plan.controller import settle
from ragfuse.plan.tiers import choose_level, choose_tier, promotions
from ragfuse.settings import AUTO_LEVEL, Settings
from ragfuse.store import KVStore, Tier
from ragfuse.types.keys import ChunkKey
from ragfuse.types.profiles import ModelProfile

log = logging.getLogger("ragfuse.engine")

MAX_PROMOTIONS = 2
"""Most chunks that are copied to a faster tier after one answer."""


class Placement:
    """Chooses tiers and codec levels for an engine's chunks. Thread-safe.

    Args:
        settings: Prices, levels and placement.
        store: The tiers to choose from.
        timings: Timings of this machine.
    """

    def __init__(self, settings: Settings, store: KVStore, timings: MachineTimings) -> None:
        self._settings, self._store, self._timings = settings, store, timings
        self._lock, self._promoted = threading.Lock(), 0

    @property
    def slow_tiers(self) -> list[Tier]:
        """The tiers that outlive the process."""
        return [tier for tier in self._store.tiers if tier.slow]

    def home(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> str | None:
        """Return the slow tier to write a new chunk to.

        None means all of them: by the settings, or because this machine was not measured.
        """
        machine, slow = self._timings.corrected(model), [tier.name for tier in self.slow_tiers]
        if machine is None or len(slow) < 2 or self._settings.placement == "all":
            return None
        prices, ratio = self._settings.prices.model_dump(), self._ratio(profile)
        written = {tier: self._store.levels.of(tier) for tier in slow} | self.levels(model, profile, n_tokens, nbytes)
        return choose_tier(n_tokens, nbytes, machine, slow, prices, ratio, written)

    def levels(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> dict[str, tuple[str, ...]]:
        """Return the level of a new chunk in each tier whose level is `auto`; raw until the machine was measured."""
        chosen = [tier for tier, levels in self._settings.written.items() if levels == (AUTO_LEVEL,)]
        machine = self._timings.corrected(model) if chosen else None
        if machine is None:
            return {}
        ratio = self._ratio(profile)
        return {tier: (choose_level(n_tokens, nbytes, machine, tier, ratio),) for tier in chosen}

    def promote(self, model: HFModel, keys: Sequence[ChunkKey]) -> None:
        """Copy those of these chunks that are hit often to a faster tier with room, at most `MAX_PROMOTIONS`."""
        machine = self._timings.corrected(model)
        if machine is None:
            return
        entries = [entry for tier in self._store.tiers for entry in tier.entries(keys).values()]
        room = {tier.name: tier.capacity - tier.nbytes for tier in self.slow_tiers}
        pinned = {entry.key for entry in entries if entry.pinned}
        for key, tier in islice(promotions(entries, machine, room), MAX_PROMOTIONS):
            self._copy(key, self._store.tier(tier), key in pinned)

    def take_promoted(self) -> int:
        """Return how many chunks were promoted since the last call."""
        with self._lock:
            promoted, self._promoted = self._promoted, 0
            return promoted

    def _ratio(self, profile: ModelProfile) -> float:
        """Return the default recompute ratio."""
        return settle(self._settings.policy, self._settings.ratio, profile.default_choice)[1]

    def _copy(self, key: ChunkKey, tier: Tier, pinned: bool) -> None:
        """Copy a chunk to a faster tier; do nothing where it cannot be read or written."""
        stored = self._store.read_whole(key)
        if stored is None or not self._store.write_whole(key, *stored, tier):
            return
        if pinned:
            tier.pin([key], True)
        tier.counts.add("promoted")
        log.info("Copied %s to the faster tier %s, as it is used often", key, tier.name)
        with self._lock:
            self._promoted += 1
