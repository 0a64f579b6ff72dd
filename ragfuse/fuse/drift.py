"""What a prompt does to all its chunks alike.

A chunk that was encoded behind filler text is close to what it becomes in a prompt, and off to one side: part of the
difference is the same for every token of every chunk. That part, the drift, is the mean difference per layer, head and
dim before rotation. It is measured once per model on prompts of any kind, and added where a chunk is encoded, so that
it costs nothing when a question comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ragfuse.fuse.rope import shifted_rows
from ragfuse.types.kv import ChunkKV, LayerKV, RopeLayout

Rope = Sequence[RopeLayout | None]


def added(kv: ChunkKV, drift: ChunkKV, rope: Rope) -> ChunkKV:
    """The KV of a chunk at positions 0..n-1 with the drift, of one row at position 0, added to every row."""
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
    """The drift: mean of wanted - found, before rotation, over the rows of all pairs, float32, one row at position 0.

    pairs: (found, wanted, rows) of whole prompts at positions 0..T-1: with chunks behind filler text, by full prefill,
    and int64 [n], the rows of those chunks. ValueError if there is no row.
    """
    total: list[LayerKV] | None = None
    count = 0
    for found, wanted, rows in pairs:
        back = -rows.double()
        here = []
        for mine, theirs, layout in zip(found.layers, wanted.layers, rope, strict=True):
            keys, values = (
                shifted_rows((b[:, rows].float() - a[:, rows].float()), back, _of(layout, name)).sum(1, keepdim=True)
                for name, a, b in (("keys", mine.keys, theirs.keys), ("values", mine.values, theirs.values))
            )
            here.append(LayerKV(keys, values))
        pairs_of = zip(total, here, strict=True) if total is not None else ()
        total = [LayerKV(a.keys + b.keys, a.values + b.values) for a, b in pairs_of] or here
        count += len(rows)
    if total is None or not count:
        raise ValueError("A drift is measured on one row at least.")
    return ChunkKV(tuple(LayerKV(layer.keys / count, layer.values / count) for layer in total))


def _of(layout: RopeLayout | None, part: str) -> RopeLayout | None:
    return layout if layout is not None and layout.part == part else None
