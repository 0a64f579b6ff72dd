"""Copies rows out of a prompt's KV as a run at positions 0..n-1, the form in which KV is stored (AttentionStore 3.4).

Keys are rotated once, in float32; the prompt's own KV is not modified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragfuse.fuse.rope import shifted
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout


def gathered(kv: ChunkKV, spans: Sequence[tuple[int, int]], rope: Sequence[RopeLayout | None]) -> ChunkKV:
    """Return the rows of all spans, concatenated, as KV at positions 0..n-1.

    Args:
        kv: KV of a prompt whose row i stands at position i.
        spans: Rows lo:hi to copy, in order.
        rope: The rotation of each layer; None where keys carry no position.

    Returns:
        A copy that shares no memory with `kv`.
    """
    return ChunkKV(tuple(_layer(layer, spans, layout) for layer, layout in zip(kv.layers, rope, strict=True)))


def _layer(layer: LayerKV, spans: Sequence[tuple[int, int]], layout: RopeLayout | None) -> LayerKV:
    rotates_values = layout is not None and layout.part == "values"
    keys = _rows(layer.keys, spans, None if rotates_values else layout)
    values = _rows(layer.values, spans, layout if rotates_values else None)
    return replace(layer, keys=keys, values=values)


def _rows(states: Tensor, spans: Sequence[tuple[int, int]], layout: RopeLayout | None) -> Tensor:
    """Return the rows of `spans` [H, n, D], each rotated by the distance that it moves."""
    parts, at = list[Tensor](), 0
    for lo, hi in spans:
        parts.append(shifted(states[:, lo:hi], at - lo, layout))
        at += hi - lo
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)
