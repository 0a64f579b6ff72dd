"""The first tokens of every chunk (EPIC's LegoLink): static, so no layer is computed in full and nothing is checked."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragfuse.fuse.select.policy import Compare, View, Wanted


@dataclass(frozen=True)
class Lego:
    """The first `first` tokens of each chunk, or as many as the ratio allows when `first` is 0."""

    name: str = "lego"
    first: int = 0
    check_layer: int = 0
    compare: Compare = "kv"
    wants: Wanted = "nothing"

    def thins(self, view: View, layer: int, alive: int) -> bool:
        """Never by deviation."""
        return False

    def choose(self, view: View, layer: int, alive: Tensor, deviation: Tensor | None) -> Tensor:
        """Those with the lowest offsets; ratio 1 takes all."""
        if layer > 0 or view.ratio >= 1:
            return alive
        if self.first:
            return alive[view.offset < self.first]
        return alive[view.offset.argsort(stable=True)[: view.budget(view.ratio)].sort().values]
