"""The two ends: everything and nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Compare, View, Wanted


@dataclass(frozen=True)
class Full:
    """Every row: full prefill."""

    name: str = "full"
    check_layer: int = 0
    compare: Compare = "kv"
    wants: Wanted = "nothing"

    def thins(self, view: View, layer: int, alive: int) -> bool:
        """Never."""
        return False

    def choose(self, view: View, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """All that are left."""
        return alive


@dataclass(frozen=True)
class Nothing:
    """No row: full KV reuse (Prompt Cache)."""

    name: str = "none"
    check_layer: int = 0
    compare: Compare = "kv"
    wants: Wanted = "nothing"

    def thins(self, view: View, layer: int, alive: int) -> bool:
        """Never."""
        return False

    def choose(self, view: View, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """None of them."""
        return alive[:0]
