"""The raw codec: KV as the model computed it. Lossless, and decoded without any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from ragfuse.codec.codec import DTYPES, LayerMeta
from ragfuse.types.kv import LayerKV


@dataclass(frozen=True, slots=True)
class RawCodec:
    """The raw codec: the bytes of the keys, then those of the values, in the model's dtype."""

    name: str = "raw"

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Copy a layer into uint8 `[nbytes]`; `at` makes no difference.

        Raises:
            ValueError: Keys and values have different dtypes.
        """
        return _copied(layer, torch.empty(layer.nbytes, dtype=torch.uint8, device=layer.keys.device))

    def encode_all(self, layers: Sequence[LayerKV]) -> tuple[Tensor, ...]:
        """Copy all layers into one block of host memory and return their parts of it, uint8 `[nbytes]` each.

        In one block they lie at even distances, so that a prompt takes many of them in one copy.

        Raises:
            ValueError: Keys and values have different dtypes.
        """
        sizes = [layer.nbytes for layer in layers]
        parts = torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes)
        return tuple(_copied(layer, part) for layer, part in zip(layers, parts, strict=True))

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Return views of `blob`: no byte is copied, so do not write to the result.

        Raises:
            ValueError: The length of `blob` does not fit `meta`.
        """
        if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() != meta.decoded_nbytes:
            raise ValueError(
                f"The layer should have {meta.decoded_nbytes} bytes, found {tuple(blob.shape)} {blob.dtype}."
            )
        numbers, split = blob.view(DTYPES[meta.dtype]), prod(meta.key_shape)
        return LayerKV(numbers[:split].view(meta.key_shape), numbers[split:].view(meta.value_shape))


def _copied(layer: LayerKV, blob: Tensor) -> Tensor:
    """Copy a layer's keys and values into uint8 `[nbytes]` and return it."""
    dtype, split = layer.keys.dtype, layer.keys.nbytes
    if dtype != layer.values.dtype:
        raise ValueError(f"Keys are {dtype}, values {layer.values.dtype}: both must have the same dtype.")
    blob[:split].view(dtype).view(layer.keys.shape).copy_(layer.keys)
    blob[split:].view(dtype).view(layer.values.shape).copy_(layer.values)
    return blob


RAW: Final = RawCodec()
"""The raw codec. It has no state, so one instance serves all."""
