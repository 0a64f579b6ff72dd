"""The interface of a codec, and the description of an encoded layer that is needed to decode it.

Encoded bytes are 1-D uint8 tensors everywhere, so one codec serves host memory, pinned memory, GPU
memory and disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from ragfuse.types.kv import LayerKV

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }
)
"""The dtypes of KV that can be stored, by the name that is written with the bytes."""


@dataclass(frozen=True, slots=True)
class LayerMeta:
    """The description of one encoded layer.

    Args:
        key_shape: (kv_heads, tokens, head_dim) of the keys.
        value_shape: (kv_heads, tokens, head_dim) of the values; their head_dim may differ.
        dtype: Name of the decoded dtype, one of `DTYPES`.
        nbytes: Encoded bytes.
        checksum: BLAKE3 of the encoded bytes in hex; "" until they are first written.
    """

    key_shape: tuple[int, int, int]
    value_shape: tuple[int, int, int]
    dtype: str
    nbytes: int
    checksum: str = ""

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of keys and values once decoded."""
        return (prod(self.key_shape) + prod(self.value_shape)) * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, layer: LayerKV, blob: Tensor) -> LayerMeta:
        """Return the description of `blob`, which encodes `layer`, without a checksum."""
        dtype = str(layer.keys.dtype).removeprefix("torch.")
        key_shape: Any = tuple(layer.keys.shape)
        value_shape: Any = tuple(layer.values.shape)
        return cls(key_shape, value_shape, dtype, blob.numel())

    def sealed(self, blob: Tensor) -> LayerMeta:
        """Return this description with the checksum of `blob`, unless it has one already."""
        return self if self.checksum else replace(self, checksum=checksum(blob))


class Codec(Protocol):
    """A codec: encodes a layer's KV to bytes and decodes it."""

    @property
    def name(self) -> str:
        """Name of its codec level, as written in entries and plans."""
        ...

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Encode a layer.

        Args:
            layer: Keys and values `[kv_heads, tokens, head_dim]`.
            at: Index of the layer in the model.

        Returns:
            uint8 `[nbytes]` on the layer's device, sharing no memory with the layer.

        Raises:
            ValueError: The codec cannot encode this layer.
        """
        ...

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """Decode a layer.

        Args:
            blob: What `encode` returned, uint8 `[nbytes]`.
            meta: Its description.

        Returns:
            The layer on the blob's device. It may be a view of the blob: do not write to it.

        Raises:
            ValueError: The bytes do not fit the description, or are damaged.
        """
        ...


def checksum(blob: Tensor) -> str:
    """Return the BLAKE3 checksum of uint8 `[nbytes]` as 64 hex digits."""
    return blake3(blob.cpu().contiguous().numpy().data).hexdigest()
