"""The choice of tiers and codec levels for new chunks, by the timings of this machine."""

from __future__ import annotations

from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.hf.model import HFModel
from ragfuse.plan.controller import settle
from ragfuse.plan.tiers import choose_level, choose_tier
from ragfuse.settings import AUTO_LEVEL, Settings
from ragfuse.store import KVStore
from ragfuse.types.profiles import ModelProfile


class Placement:
    """Chooses tiers and codec levels for an engine's chunks. Thread-safe.

    Args:
        settings: Prices, levels and placement.
        store: The tiers to choose from.
        timings: Timings of this machine.
    """

    def __init__(self, settings: Settings, store: KVStore, timings: MachineTimings) -> None:
        self._settings, self._store, self._timings = settings, store, timings

    def home(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> str | None:
        """Return the slow tier to write a new chunk to.

        None means all of them: by the settings, or because this machine was not measured.
        """
        costs, slow = self._timings.costs(model), [tier.name for tier in self._store.tiers if tier.slow]
        if costs is None or len(slow) < 2 or self._settings.placement == "all":
            return None
        prices, ratio = self._settings.prices.model_dump(), self._ratio(profile)
        written = {tier: self._store.levels.of(tier) for tier in slow} | self.levels(model, profile, n_tokens, nbytes)
        return choose_tier(n_tokens, nbytes, costs, slow, prices, ratio, written)

    def levels(self, model: HFModel, profile: ModelProfile, n_tokens: int, nbytes: int) -> dict[str, tuple[str, ...]]:
        """Return the level of a new chunk in each tier whose level is `auto`; raw until the machine was measured."""
        chosen = [tier for tier, levels in self._settings.written.items() if levels == (AUTO_LEVEL,)]
        costs = self._timings.costs(model) if chosen else None
        if costs is None or not costs.tiers:
            return {}
        ratio = self._ratio(profile)
        return {tier: (choose_level(n_tokens, nbytes, costs, tier, ratio),) for tier in chosen}

    def _ratio(self, profile: ModelProfile) -> float:
        """Return the default recompute ratio."""
        return settle(self._settings.policy, self._settings.ratio, profile.default_choice)[1]
