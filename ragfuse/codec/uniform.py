"""Uniform quantisation to 8 bits, one scale per head and token. Needs no tables; runs on the
layer's device.

Scales are per token, not per channel, as a few tokens (above all the first of a text) are many
times larger than the rest and would stretch the scale of every channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ragfuse.codec.codec import DTYPES, LayerMeta
from ragfuse.codec.container import narrowed, pack, unpack
from ragfuse.codec.quantise import BIN_SCALE_DTYPE, from_8bit, to_8bit
from ragfuse.types.kv import LayerKV


@dataclass(frozen=True, slots=True)
class UniformCodec:
    """A codec that stores keys and values as signed codes of 8 bits, with one scale per head and
    token.
    """

    name: str = "int8"

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode a layer to uint8 `[nbytes]` (`Codec.encode`).

        Raises:
            ValueError: The layer holds NaN or infinities, which only the raw codec can store.
        """
        parts = list[Tensor]()
        for tensor in (layer.keys, layer.values):
            codes, scales = to_8bit(tensor.float())
            if not scales.isfinite().all():
                raise ValueError(
                    "The layer contains NaN or infinity, which only level raw can store."
                )
            parts += codes.reshape(-1).view(torch.uint8), scales.reshape(-1).view(torch.uint8)
        return pack(at, "", b"", parts)

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer (`Codec.decode`): code times scale, in the dtype of `meta`."""
        _, _, parts = unpack(blob, "")
        dtype = DTYPES[meta.dtype]
        return LayerKV(
            _decoded(parts[:2], meta.key_shape, dtype),
            _decoded(parts[2:4], meta.value_shape, dtype),
        )


def _decoded(parts: tuple[Tensor, ...], shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    codes, scales = parts
    by = scales.clone().view(BIN_SCALE_DTYPE).view(*shape[:2], 1)
    return narrowed(from_8bit(codes.view(torch.int8).view(shape), by), dtype)


INT8: Final = UniformCodec()
"""The codec of level int8. It has no state, so one instance serves all."""
