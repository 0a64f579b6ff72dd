"""The drift: a constant offset between the KV of a chunk encoded after filler text and its KV
inside a real prompt.

Part of the difference between the two is the same for every token of every chunk. The drift is that
part: the mean difference per layer, head and dim, before rotation. It is measured once per model,
on any prompts, and added when a chunk is encoded, so it costs nothing at question time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragfuse.fuse.rope import part_layout, shifted
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout

Rope = Sequence[RopeLayout | None]


def added(kv: ChunkKV, drift: ChunkKV, rope: Rope) -> ChunkKV:
    """Return the KV of a chunk with the drift added to every row.

    Args:
        kv: The chunk's KV, keys at positions 0..n-1.
        drift: One row per layer, as `training/drift.py` measures it, at position 0.
        rope: The rotation of each layer; None where keys carry no position.
    """
    positions = torch.arange(kv.n_tokens, dtype=torch.float64)[:, None]

    def moved(part: Tensor, one: Tensor, layout: RopeLayout | None) -> Tensor:
        every = one.float().expand(-1, kv.n_tokens, -1)
        return (part.float() + shifted(every, positions, layout)).to(part)

    return ChunkKV(
        tuple(
            LayerKV(
                moved(layer.keys, one.keys, part_layout(layout, "keys")),
                moved(layer.values, one.values, part_layout(layout, "values")),
            )
            for layer, one, layout in zip(kv.layers, drift.layers, rope, strict=True)
        )
    )
