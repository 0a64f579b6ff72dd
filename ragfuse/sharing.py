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
        slot = _slot(source, dtype, device)
        if not slot:
            slot.append(load_model(source, dtype, device, profile_of))
        return slot[0]


def forget_models() -> None:
    """Let go of all shared models that nobody else holds."""
    with _LOADING:
        _slot.cache_clear()


@lru_cache(maxsize=2)
def _slot(source: str, dtype: str, device: str) -> list[HFModel]:
    """Where one model is kept, empty at first."""
    return []
