"""Rows of a prompt's KV as a run of their own, at positions 0..n-1, as all stored KV is (AttentionStore 3.4).

The rotation runs in float32, once, and touches nothing of the prompt's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragfuse.fuse.rope import shifted
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout


def gathered(kv: ChunkKV, spans: Sequence[tuple[int, int]], rope: Sequence[RopeLayout | None]) -> ChunkKV:
    """Rows lo:hi of every span, one behind the other. kv: of a prompt whose row i stands at position i; rope by layer.

    The result shares no memory with `kv`.
    """
    return ChunkKV(tuple(_layer(layer, spans, layout) for layer, layout in zip(kv.layers, rope, strict=True)))


def _layer(layer: LayerKV, spans: Sequence[tuple[int, int]], layout: RopeLayout | None) -> LayerKV:
    turned = layout is not None and layout.part == "values"
    keys = _rows(layer.keys, spans, None if turned else layout)
    values = _rows(layer.values, spans, layout if turned else None)
    return replace(layer, keys=keys, values=values)


def _rows(states: Tensor, spans: Sequence[tuple[int, int]], layout: RopeLayout | None) -> Tensor:
    """States [H, n, D] of the rows of `spans`, each turned back by as much as it moves."""
    parts, at = list[Tensor](), 0
    for lo, hi in spans:
        parts.append(shifted(states[:, lo:hi], at - lo, layout))
        at += hi - lo
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)
