"""The drift: a constant offset between the KV of a chunk encoded behind filler text and its KV inside a real prompt.

Part of the difference between the two is the same for every token of every chunk. The drift is that part: the mean
difference per layer, head and dim, before rotation. It is measured once per model, on any prompts, and added when a
chunk is encoded, so it costs nothing at question time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ragfuse.fuse.rope import shifted_rows
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout

Rope = Sequence[RopeLayout | None]


def added(kv: ChunkKV, drift: ChunkKV, rope: Rope) -> ChunkKV:
    """Return the KV of a chunk with the drift added to every row.

    Args:
        kv: The chunk's KV, keys at positions 0..n-1.
        drift: One row per layer, as `measured` returns it, at position 0.
        rope: The rotation of each layer; None where keys carry no position.
    """
    positions = torch.arange(kv.n_tokens, dtype=torch.float64)
    layers = []
    for layer, one, layout in zip(kv.layers, drift.layers, rope, strict=True):
        keys, values = (
            shifted_rows(part.expand(-1, kv.n_tokens, -1), positions, _of(layout, name))
            for name, part in (("keys", one.keys), ("values", one.values))
        )
        keys, values = (layer.keys.float() + keys).to(layer.keys), (layer.values.float() + values).to(layer.values)
        layers.append(LayerKV(keys, values))
    return ChunkKV(tuple(layers))


def measured(pairs: Iterable[tuple[ChunkKV, ChunkKV, Tensor]], rope: Rope) -> ChunkKV:
    """Return the drift: the mean of wanted - found over the given rows of all prompts, before rotation.

    Args:
        pairs: (found, wanted, rows) per prompt, at positions 0..T-1. found: KV with chunks encoded behind filler text;
            wanted: KV by full prefill; rows: int64 [n], the rows of those chunks.
        rope: The rotation of each layer; None where keys carry no position.

    Returns:
        float32, one row per layer, at position 0.

    Raises:
        ValueError: There is no row to measure on.
    """
    total: list[LayerKV] | None = None
    count = 0
    for found, wanted, rows in pairs:
        back = -rows.double()
        differences = []
        for found_layer, wanted_layer, layout in zip(found.layers, wanted.layers, rope, strict=True):
            parts = (
                ("keys", found_layer.keys, wanted_layer.keys),
                ("values", found_layer.values, wanted_layer.values),
            )
            keys, values = (
                shifted_rows((b[:, rows].float() - a[:, rows].float()), back, _of(layout, name)).sum(1, keepdim=True)
                for name, a, b in parts
            )
            differences.append(LayerKV(keys, values))
        sums = zip(total, differences, strict=True) if total is not None else ()
        total = [LayerKV(a.keys + b.keys, a.values + b.values) for a, b in sums] or differences
        count += len(rows)
    if total is None or not count:
        raise ValueError("A drift is measured on at least one row (a token), found none.")
    return ChunkKV(tuple(LayerKV(layer.keys / count, layer.values / count) for layer in total))


def _of(layout: RopeLayout | None, part: str) -> RopeLayout | None:
    return layout if layout is not None and layout.part == part else None
