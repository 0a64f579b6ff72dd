"""Store a named value (not KV) in a tier, as an entry of two layers: the value, then its name.

So it is written whole, has checksums, counts towards the capacity and can be evicted like any other
entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragfuse.codec import RAW, LayerMeta
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.keys import ChunkKey

_ONE_BYTE = "float8_e5m2"


def as_entry(name: str, value: bytes) -> Whole:
    """Return the entry that holds a value and its name."""
    layers = [_layer(value), _layer(name.encode("utf-8", "surrogatepass"))]
    metas, blobs = zip(*layers, strict=True)
    return EntryMeta(1, (RAW.name,), metas), blobs


def value_of(tier: Tier, key: ChunkKey, layer: int = 0) -> bytes | None:
    """Read the value (layer 0) or the name (layer 1) of such an entry; None if it cannot be
    read.
    """
    found = tier.get(key, range(layer, layer + 1))
    return None if found is None else next(blob for blob in found[1:])[1:-1].numpy().tobytes()


def _layer(data: bytes) -> tuple[LayerMeta, Tensor]:
    """Wrap bytes, between two bytes of 1, as a layer of one token: one byte of keys, the rest as
    values.
    """
    blob = torch.frombuffer(bytearray(b"\1" + data + b"\1"), dtype=torch.uint8)
    return LayerMeta((1, 1, 1), (1, 1, len(data) + 1), _ONE_BYTE, blob.numel()), blob
