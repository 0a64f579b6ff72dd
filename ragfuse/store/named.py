"""A named value as an entry of a tier: two layers, the value and then its name, in the tier's own form.

So it is published whole, under checksums and within the capacity, and goes like any other entry. It is no KV.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragfuse.codec import RAW, LayerMeta
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.keys import ChunkKey

_ONE_BYTE = "float8_e5m2"


def as_entry(name: str, value: bytes) -> Whole:
    """The entry that holds a value and its name."""
    layers = [_layer(value), _layer(name.encode("utf-8", "surrogatepass"))]
    metas, blobs = zip(*layers, strict=True)
    return EntryMeta(1, (RAW.name,), metas), blobs


def value_of(tier: Tier, key: ChunkKey, layer: int = 0) -> bytes | None:
    """What a layer of such an entry holds: 0 the value, 1 the name; None where none can be read."""
    found = tier.read(key, layer)
    return None if found is None else next(blob for blob in found[1:])[1:-1].numpy().tobytes()


def _layer(data: bytes) -> tuple[LayerMeta, Tensor]:
    """Bytes between two ones, as a layer of one token: keys of one byte, values of the rest."""
    blob = torch.frombuffer(bytearray(b"\1" + data + b"\1"), dtype=torch.uint8)
    return LayerMeta((1, 1, 1), (1, 1, len(data) + 1), _ONE_BYTE, blob.numel()), blob
