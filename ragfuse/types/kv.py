"""Tensors of a chunk's KV, their position layout, and what the store knows of an entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ragfuse.types.keys import ChunkKey


@dataclass(frozen=True)
class RopeLayout:
    """How one layer's keys carry position: `2 * len(inv_freq)` dims from `lo` on are rotated, the others are not.

    inv_freq: radians per position of every pair. pairing: dim i goes with i + half ("half") or 2i with 2i + 1.
    part: which of the two cached tensors carries it (latent attention caches its rotated part second).
    """

    inv_freq: tuple[float, ...]
    lo: int = 0
    pairing: Literal["half", "interleaved"] = "half"
    part: Literal["keys", "values"] = "keys"


@dataclass(frozen=True)
class LayerKV:
    """One layer of one run. keys: [H, n, D], values: [H, n, Dv], model dtype; keys at positions 0..n-1 of the run."""

    keys: Tensor
    values: Tensor

    @property
    def n_tokens(self) -> int:
        """n."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class ChunkKV:
    """The KV of one run, layer by layer; layers may differ in heads and head dim. Never mutated."""

    layers: tuple[LayerKV, ...]

    @property
    def n_tokens(self) -> int:
        """n."""
        return self.layers[0].n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store knows of one key. May be stale: a read that fails is a miss, never an exception.

    sizes: bytes of each codec level that is kept, in their order; what is said of the entry counts to the first.
    n_layers: layers of the model, which every level has.
    """

    key: ChunkKey
    tier: str
    n_tokens: int
    n_layers: int
    sizes: Mapping[str, int]
    last_used: float
    hits: int = 0
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes over all levels."""
        return sum(self.sizes.values())
