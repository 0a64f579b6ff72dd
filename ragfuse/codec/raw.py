"""Raw bytes: what the model computed, unchanged. Lossless, no work to read. Packing codecs have their own files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from ragfuse.codec.codec import DTYPES, LayerMeta
from ragfuse.types.kv import LayerKV


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Keys' bytes, then values' bytes, in the model's dtype."""

    name: str = "raw"

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """uint8 [nbytes]: a copy, made in one pass; the same for every layer of a model."""
        dtype = layer.keys.dtype
        if dtype != layer.values.dtype:
            raise ValueError(f"Keys are {dtype}, values {layer.values.dtype}: a layer has one dtype.")
        blob = torch.empty(layer.nbytes, dtype=torch.uint8, device=layer.keys.device)
        blob[: layer.keys.nbytes].view(dtype).view(layer.keys.shape).copy_(layer.keys)
        blob[layer.keys.nbytes :].view(dtype).view(layer.values.shape).copy_(layer.values)
        return blob

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Views of `blob`: no byte is copied, so the result must not be written to."""
        if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() != meta.decoded_nbytes:
            raise ValueError(f"{meta.decoded_nbytes} bytes wanted, {tuple(blob.shape)} {blob.dtype} found.")
        dtype = DTYPES[meta.dtype]
        split = prod(meta.key_shape) * dtype.itemsize
        keys, values = blob[:split].view(dtype), blob[split:].view(dtype)
        return LayerKV(keys.view(meta.key_shape), values.view(meta.value_shape))


RAW: Final = RawCodec()
"""The raw codec: it has no state, so one is enough."""
