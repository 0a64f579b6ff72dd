"""What a codec is, and what must be known of a layer's bytes to read them back.

Bytes are 1-D uint8 tensors everywhere, so one codec serves host memory, pinned memory, GPU memory and disk.
Files, tiers and keys live in `store`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
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
"""The dtypes that KV is kept in, by the name written beside the bytes."""


@dataclass(frozen=True, slots=True)
class LayerMeta:
    """One layer's bytes described: key_shape (H, n, D), value_shape (H, n, Dv), dtype name, nbytes, checksum.

    `nbytes` counts the encoded bytes. `checksum` is their BLAKE3 in hex, "" until the bytes are first written.
    """

    key_shape: tuple[int, int, int]
    value_shape: tuple[int, int, int]
    dtype: str
    nbytes: int
    checksum: str = ""

    def __post_init__(self) -> None:
        for shape in (self.key_shape, self.value_shape):
            if len(shape) != 3 or not all(type(size) is int and size > 0 for size in shape):
                raise ValueError(f"Shape {shape} is not (heads, tokens, dim).")
        if self.key_shape[1] != self.value_shape[1]:
            raise ValueError(f"Keys hold {self.key_shape[1]} tokens, values {self.value_shape[1]}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"Dtype {self.dtype!r} is not kept; these are: {', '.join(DTYPES)}.")
        if type(self.nbytes) is not int or self.nbytes < 1 or type(self.checksum) is not str:
            raise ValueError(f"{self.nbytes!r} bytes with checksum {self.checksum!r} describe no layer.")

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of keys and values once decoded."""
        return (prod(self.key_shape) + prod(self.value_shape)) * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, layer: LayerKV, blob: Tensor) -> LayerMeta:
        """The description of `blob`, which encodes `layer`; not summed yet."""
        heads, n, dim = layer.keys.shape
        value_heads, value_n, value_dim = layer.values.shape
        dtype = str(layer.keys.dtype).removeprefix("torch.")
        return cls((heads, n, dim), (value_heads, value_n, value_dim), dtype, blob.numel())

    def sealed(self, blob: Tensor) -> LayerMeta:
        """This description with the checksum of `blob`, unless it has one already."""
        return self if self.checksum else replace(self, checksum=checksum(blob))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerMeta:
        """The description written by `as_dict`; ValueError if it is none."""
        try:
            shapes = (tuple(data["key_shape"]), tuple(data["value_shape"]))
            return cls(*shapes, data["dtype"], data["nbytes"], data["checksum"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a layer: {error!r}") from error


class Codec(Protocol):
    """Turns a layer into bytes and back. `name` is the level that entries are written under."""

    @property
    def name(self) -> str:
        """The level, as written in entries and plans."""
        ...

    def encode(self, layer: LayerKV, at: int = 0) -> Tensor:
        """Layer `at` of the model as uint8 [nbytes], on the layer's device, sharing no memory with it."""
        ...

    def decode(self, blob: Tensor, meta: LayerMeta) -> LayerKV:
        """The layer held by `blob`, on its device; ValueError if `blob` is not what `meta` says. May be a view."""
        ...


def checksum(blob: Tensor) -> str:
    """BLAKE3 of uint8 [nbytes], 64 hex digits."""
    return blake3(blob.cpu().contiguous().numpy().data).hexdigest()
