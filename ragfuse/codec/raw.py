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
        """Copy a layer into uint8 `[nbytes]`; `at` makes no difference."""
        return _copied(
            layer, torch.empty(layer.nbytes, dtype=torch.uint8, device=layer.keys.device)
        )

    def encode_all(self, layers: Sequence[LayerKV]) -> tuple[Tensor, ...]:
        """Copy all layers into one block of host memory and return their parts of it, uint8
        `[nbytes]` each.

        In one block they lie at even distances, so that a prompt takes many of them in one copy.
        """
        sizes = [layer.nbytes for layer in layers]
        parts = torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes)
        return tuple(_copied(layer, part) for layer, part in zip(layers, parts, strict=True))

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Return views of `blob`: no byte is copied, so do not write to the result.

        Raises:
            ValueError: The length of `blob` does not fit `meta`.
        """
        return self.decode_all([blob], [meta])[0]

    def decode_all(self, blobs: Sequence[Tensor], metas: Sequence[LayerMeta]) -> list[LayerKV]:
        """Decode several layers as `decode` does.

        Layers that are alike and lie at even distances in one block, as `encode_all` leaves them,
        take as few operations as one layer.
        """
        for blob, meta in zip(blobs, metas, strict=True):
            if blob.numel() != meta.decoded_nbytes:
                raise ValueError(
                    f"The layer should have {meta.decoded_nbytes} bytes, found {blob.numel()}."
                )
        starts = [blob.storage_offset() for blob in blobs]
        step = (starts[-1] - starts[0]) // max(1, len(starts) - 1)
        blocks = {blob.untyped_storage().data_ptr() for blob in blobs}
        shapes = {(meta.key_shape, meta.value_shape, meta.dtype) for meta in metas}
        is_even = step >= 0 and starts == [starts[0] + at * step for at in range(len(starts))]
        if not is_even or len(blocks) > 1 or len(shapes) > 1:
            return [self.decode(blob, meta) for blob, meta in zip(blobs, metas, strict=True)]
        numbers = blobs[0].view(DTYPES[metas[0].dtype])
        at, parts = numbers.storage_offset(), list[Sequence[Tensor]]()
        for shape in (metas[0].key_shape, metas[0].value_shape):
            strides = step // numbers.itemsize, shape[1] * shape[2], shape[2], 1
            parts.append(numbers.as_strided((len(blobs), *shape), strides, at).unbind(0))
            at += prod(shape)
        return [LayerKV(keys, values) for keys, values in zip(*parts, strict=True)]


def _copied(layer: LayerKV, blob: Tensor) -> Tensor:
    """Copy a layer's keys and values into uint8 `[nbytes]` and return it."""
    dtype, split = layer.keys.dtype, layer.keys.nbytes
    blob[:split].view(dtype).view(layer.keys.shape).copy_(layer.keys)
    blob[split:].view(dtype).view(layer.values.shape).copy_(layer.values)
    return blob


RAW: Final = RawCodec()
"""The raw codec. It has no state, so one instance serves all."""
