"""Models that are loaded once and used by all who name the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache

from ragfuse.hf.model import HFModel, load_model
from ragfuse.profiles import ModelProfile

_LOADING = threading.Lock()


def shared_model(
    source: str, dtype: str, device: str, profile_of: Callable[[str], ModelProfile | None] | None = None
) -> HFModel:
    """The model at `source` in `dtype` on `device`, loaded by the first who asks; the last two stay loaded."""
    with _LOADING:
        return _loaded(source, dtype, device, profile_of)


def forget_models() -> None:
    """Let go of all shared models that nobody holds."""
    with _LOADING:
        _cached.cache_clear()


@lru_cache(maxsize=2)
def _cached(source: str, dtype: str, device: str) -> list[HFModel]:
    return []


def _loaded(
    source: str, dtype: str, device: str, profile_of: Callable[[str], ModelProfile | None] | None
) -> HFModel:
    slot = _cached(source, dtype, device)
    if not slot:
        slot.append(load_model(source, dtype, device, profile_of))
    return slot[0]
