"""Store a value (not KV) in a tier, as an entry of one layer.

So it is written whole, has checksums, counts towards the capacity and can be evicted like any other
entry.
"""

from __future__ import annotations

import torch

from ragfuse.codec import RAW, LayerMeta
from ragfuse.store.tier import EntryMeta, Tier, Whole
from ragfuse.types.keys import ChunkKey

_ONE_BYTE = "float8_e5m2"


def as_entry(value: bytes) -> Whole:
    """Return the entry that holds a value: between two bytes of 1, as a layer of one token, with
    one byte of keys and the rest as values.
    """
    blob = torch.frombuffer(bytearray(b"\1" + value + b"\1"), dtype=torch.uint8)
    layer = LayerMeta((1, 1, 1), (1, 1, len(value) + 1), _ONE_BYTE, blob.numel())
    return EntryMeta(1, (RAW.name,), (layer,)), (blob,)


def value_of(tier: Tier, key: ChunkKey) -> bytes | None:
    """Read the value of such an entry; None if it cannot be read."""
    for blob in (tier.get(key, range(1)) or ())[1:]:
        return blob[1:-1].numpy().tobytes()
    return None
