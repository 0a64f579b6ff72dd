"""What KV looks like to a codec: how close neighbours in a text are, and what grouping tells of a value.

CacheGen section 5.1, figures 3 and 5. Keys come as the model caches them and turned back to before RoPE.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from ragfuse_bench.codec.kv import before_rope
from torch import Tensor

from ragfuse.types.kv import ChunkKV, LayerKV
from ragfuse.types.profiles import ModelProfile

GROUP = 10
"""Tokens of a group: the first is the anchor of the others."""
STEP = 0.25
"""Step of the symbols whose entropy is taken, in standard deviations of all keys or all values of a model."""
SYMBOLS = 256
GROUPINGS = ("none", "token", "channel", "layer", "channel and layer")
PARTS = ("keys", "keys before RoPE", "values")


def parts_of(layer: LayerKV, at: int, profile: ModelProfile) -> Iterator[tuple[str, Tensor]]:
    """Each of `PARTS` as float32 [channels, n]."""
    turned = before_rope(layer, at, profile)
    for name, rows in zip(PARTS, (layer.keys, turned.keys, layer.values), strict=True):
        yield name, rows.float().transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Variance:
    """Mean squares of a layer's part over values: about the layer's mean, about each channel's, and of deltas.

    delta: to the token before (the paper's figure 3). anchor: to the first of a group, the nine others of each.
    """

    layer: float
    channel: float
    delta: float
    anchor: float


def variance_of(rows: Tensor) -> Variance:
    """The variances of float32 [channels, n]."""
    whole = rows[:, : rows.shape[1] // GROUP * GROUP].reshape(len(rows), -1, GROUP)
    return Variance(
        float(rows.var(correction=0)),
        float(rows.var(1, correction=0).mean()),
        float(rows.diff(dim=1).var(correction=0)),
        float((whole[..., 1:] - whole[..., :1]).var(correction=0)),
    )


@dataclass
class Moments:
    """Means and variances of a model's parts, gathered over contexts."""

    sums: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))

    def add(self, part: str, rows: Tensor) -> None:
        """Count a layer's values."""
        held = self.sums[part]
        held[0] += rows.numel()
        held[1] += float(rows.double().sum())
        held[2] += float(rows.double().square().sum())

    def deviation(self, part: str) -> float:
        """The standard deviation of all values of a part."""
        n, total, squares = self.sums[part]
        return math.sqrt(max(squares / n - (total / n) ** 2, 0.0))


@dataclass
class Entropies:
    """Mean entropy in bits of an element's symbol, over groups, by part and grouping; a context a time.

    A group is one channel (of all layers), one layer, both, one token (all channels of all layers), or everything.
    Token groups are one context's; the others go over all contexts.
    """

    steps: dict[str, float]
    counts: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kv: ChunkKV, profile: ModelProfile) -> None:
        """Count a context's symbols."""
        by_token: dict[str, Tensor] = {}
        for at, layer in enumerate(kv.layers):
            for part, rows in parts_of(layer, at, profile):
                symbols = self._symbols(part, rows)
                channels, n = rows.shape
                counts = _histograms(symbols, torch.arange(channels)[:, None].expand(channels, n), channels)
                self._count(part, "channel and layer", at, counts, len(kv.layers))
                token = _histograms(symbols, torch.arange(n).expand(channels, n), n)
                by_token[part] = by_token.get(part, 0) + token
        for part, counts in by_token.items():
            self.tokens[part].append(bits(counts))

    def _symbols(self, part: str, rows: Tensor) -> Tensor:
        return (rows / self.steps[part]).round().long().clamp(-SYMBOLS // 2, SYMBOLS // 2 - 1) + SYMBOLS // 2

    def _count(self, part: str, grouping: str, at: int, counts: Tensor, n_layers: int) -> None:
        held = self.counts.setdefault((part, grouping), torch.zeros(n_layers, *counts.shape, dtype=torch.int64))
        held[at] += counts

    def result(self) -> dict[tuple[str, str], float]:
        """Bits an element, by part and grouping."""
        found: dict[tuple[str, str], float] = {}
        for (part, _), counts in self.counts.items():
            found[part, "none"] = bits(counts.sum((0, 1))[None])
            found[part, "token"] = sum(self.tokens[part]) / len(self.tokens[part])
            found[part, "channel"] = bits(counts.sum(0))
            found[part, "layer"] = bits(counts.sum(1))
            found[part, "channel and layer"] = bits(counts.flatten(0, 1))
        return found


def bits(counts: Tensor) -> float:
    """Entropy in bits an element within groups, from counts int64 [groups, symbols]; larger groups count for more."""
    n = counts.sum(-1, keepdim=True).double()
    shares = counts.double() / n.clamp_min(1)
    entropies = -(shares * shares.clamp_min(torch.finfo(torch.float64).tiny).log2()).sum(-1)
    return float((entropies * n[..., 0]).sum() / n.sum())


def _histograms(symbols: Tensor, groups: Tensor, n_groups: int) -> Tensor:
    """Counts int64 [groups, symbols] of symbols that belong to groups, both int64 of one shape."""
    flat = (groups * SYMBOLS + symbols).flatten()
    return torch.bincount(flat, minlength=n_groups * SYMBOLS).view(n_groups, SYMBOLS)
