"""KV tensors of a run of tokens, the RoPE layout of keys, and a tier's record of an entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ragfuse.types.keys import ChunkKey


@dataclass(frozen=True)
class RopeLayout:
    """The RoPE rotation of one layer's keys: `2 * len(inv_freq)` dims from `lo` on are rotated.

    Args:
        inv_freq: Rotation of each pair of dims in radians per position.
        lo: Index of the first rotated dim.
        pairing: "half" pairs dim i with i + half, "interleaved" pairs 2i with 2i + 1.
        part: The cached tensor that is rotated. With latent attention, transformers caches the
            rotated part as "values".
    """

    inv_freq: tuple[float, ...]
    lo: int = 0
    pairing: Literal["half", "interleaved"] = "half"
    part: Literal["keys", "values"] = "keys"


@dataclass(frozen=True)
class LayerKV:
    """The KV of a run of n tokens in one layer, in the model's dtype.

    Args:
        keys: `[kv_heads, n, head_dim]`, rotated to the positions at which the run was encoded.
            The positions are 0..n-1 unless the run's `ChunkKey` has a `layout`.
        values: `[kv_heads, n, value_head_dim]`.
    """

    keys: Tensor
    values: Tensor

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the run."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


Layer = Mapping[int, LayerKV | None]
"""One layer's KV, by index of the segment in the prompt. None if the segment's read failed."""


@dataclass(frozen=True)
class ChunkKV:
    """The KV of one run of tokens, layer by layer. Layers may differ in shape. Never mutated."""

    layers: tuple[LayerKV, ...]

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the run."""
        return self.layers[0].n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tier's record of one entry: the KV stored under one key.

    The record may be stale, so a failed read is a miss, not an exception.

    Args:
        key: The key of the entry.
        tier: Name of the tier.
        n_tokens: Number of tokens in the stored run of tokens.
        n_layers: Number of layers of the model. Each codec level stores all layers.
        sizes: Bytes of each stored codec level, from the least to the most lossy.
        last_used: Time of the latest use, in seconds since the epoch.
        hits: Number of times that the entry was read.
        pinned: True if the entry is exempt from eviction.
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
        """Total bytes of all codec levels."""
        return sum(self.sizes.values())
