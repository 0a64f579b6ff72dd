"""What a whole process holds once: loaded models, and engines of equal settings. The only such place in the house."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_LOCK = threading.RLock()
_HELD: dict[Hashable, Any] = {}


def shared(name: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave the first who asked for `name`; everybody after gets the same."""
    with _LOCK:
        if name not in _HELD:
            _HELD[name] = make()
        found: T = _HELD[name]
        return found


def forget(held: object) -> None:
    """Let go of what was given to all; the next who asks gets a new one."""
    with _LOCK:
        for name in [name for name, value in _HELD.items() if value is held]:
            del _HELD[name]
