"""How much KV the tiers of a store can take, and how much new chunks need there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine


def target_tiers(engine: Engine, n_tokens: int) -> list[str]:
    """Return the names of the tiers that new chunks of `n_tokens` are written to: slow ones, or all if none is slow."""
    slow = [tier.name for tier in engine.store.tiers if tier.slow]
    chosen = engine.runtime.encoder.home(n_tokens, n_tokens * engine.model.nbytes_per_token)
    return [chosen] if chosen is not None else slow or [tier.name for tier in engine.store.tiers]


def token_nbytes_in(engine: Engine, tier: str, run: Sequence[int]) -> float:
    """Return the bytes of KV per token in a tier; where its codec compresses, measured on the tokens `run`."""
    packed = engine.store.levels.of(tier) != ("raw",) and len(run) > 0
    return engine.runtime.encoder.nbytes_in(tier, run) / len(run) if packed else engine.model.nbytes_per_token


def room_nbytes_of(engine: Engine, name: str) -> float:
    """Return the bytes of KV that a tier can hold, limited by the free space of its disk."""
    tier = engine.store.tier(name)
    folder = getattr(tier, "path", None)
    if not isinstance(folder, Path):
        return tier.capacity
    return min(tier.capacity, tier.nbytes + 0.95 * shutil.disk_usage(folder).free)
