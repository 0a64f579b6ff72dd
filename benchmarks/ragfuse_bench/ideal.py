"""How much faster a fused prefill could be at best: rows that flow through layers, counted.
Arithmetic only.

A layer's time is taken to be proportional to the rows that it computes, and everything else
(loading, placing, checking, choosing) to be free. N layers, T prompt tokens, ctx of them in chunks,
the rest (the suffix) fresh. Policies that check (c = 1 for hkvd) compute all rows in the layers
below c; static ones (lego, lexical, query: c = 0) compute no layer in full.
"""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.types.plan import watched_layers

FORMULA = (
    "N*T / (c*T + (N-c)*(r*ctx + suffix) + N*look), ctx = all chunks, look = .75 suffix if the"
    " policy asks the query"
)
PREFIX_AWARE = (
    "N*T / (c*(T-chunk) + (N-c)*(r*(ctx-chunk) + suffix) + N*look): the first chunk is an exact"
    " prefix and is never computed"
)


@dataclass(frozen=True)
class Work:
    """What one fused prefill must compute at least.

    ratio: share of the context rows recomputed from `check_layer` on. look: whether the suffix runs
    once more over the reused cache, through three quarters of the layers, to choose them.
    """

    layers: int
    chunks: int
    chunk_tokens: int
    suffix: int
    ratio: float
    check_layer: int = 1
    look: bool = False

    @property
    def tokens(self) -> int:
        """T."""
        return self.chunks * self.chunk_tokens + self.suffix

    @property
    def ideal_speedup(self) -> float:
        """By `FORMULA`: every chunk counts as context."""
        return self._speedup(self.chunks)

    @property
    def ideal_prefix_aware(self) -> float:
        """By `PREFIX_AWARE`: what is left to compute when the first chunk is an exact prefix."""
        return self._speedup(self.chunks - 1)

    def _speedup(self, blended: int) -> float:
        context = blended * self.chunk_tokens
        below = self.check_layer * (context + self.suffix)
        above = (self.layers - self.check_layer) * (self.ratio * context + self.suffix)
        look = watched_layers(self.layers).stop * self.suffix if self.look else 0
        return self.layers * self.tokens / (below + above + look)
