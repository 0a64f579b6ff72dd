"""The codec interface, the description of an encoded layer, and the container of packed layers.

Encoded bytes are 1-D uint8 tensors everywhere, so one codec serves host memory, pinned memory, GPU
memory and disk. The container of int8 and CacheGen layers is little-endian. It has a magic number,
version, layer index, digest of the tables (zeros if there are none), 16 bytes for the codec's own
fields, number of parts, length of each part, and the parts. Shapes and checksum are in a
`LayerMeta`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
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
"""KV dtypes that can be stored, by name. The name is stored with each layer."""


@dataclass(frozen=True, slots=True)
class LayerMeta:
    """The description of one encoded layer.

    Args:
        key_shape: (kv_heads, tokens, head_dim) of the keys.
        value_shape: (kv_heads, tokens, head_dim) of the values. Keys may have another head_dim.
        dtype: Name of the decoded dtype, one of `DTYPES`.
        nbytes: Number of encoded bytes.
        checksum: BLAKE3 of the encoded bytes in hex. "" until `sealed` adds the checksum.
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
        """Describe `blob`, which encodes `layer`. The description has no checksum yet."""
        dtype = str(layer.keys.dtype).removeprefix("torch.")
        key_shape: Any = tuple(layer.keys.shape)
        value_shape: Any = tuple(layer.values.shape)
        return cls(key_shape, value_shape, dtype, blob.numel())

    def sealed(self, blob: Tensor) -> LayerMeta:
        """Return a copy with the checksum of `blob`. An existing checksum is kept."""
        return self if self.checksum else replace(self, checksum=checksum(blob))


class Codec(Protocol):
    """The interface of a codec, which encodes one layer's KV to bytes and decodes the bytes."""

    @property
    def name(self) -> str:
        """Name of the codec level, as written in entries and plans."""
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
            blob: The result of `encode`, uint8 `[nbytes]`.
            meta: The description of `blob`.

        Returns:
            The layer, on the blob's device. Never write to the layer: it may be a view of `blob`.

        Raises:
            ValueError: The bytes do not match the description, or are damaged.
        """
        ...


def checksum(blob: Tensor) -> str:
    """Return the BLAKE3 checksum of uint8 `[nbytes]` as 64 hex digits."""
    return blake3(blob.cpu().contiguous().numpy().data).hexdigest()


LAYER_MAGIC: Final = b"RFKV"
CONTAINER_VERSION: Final = 2
LAYER_HEADER: Final = struct.Struct("<4sBxH8s16sB")
TABLES: Final = slice(8, 16)


class OtherTables(ValueError):
    """Raised for a valid layer that needs other codec tables, another level or another version.

    The layer stays in the store but cannot be decoded here.
    """


def pack(at: int, digest: str, codec_fields: bytes, parts: Sequence[Tensor]) -> Tensor:
    """Pack layer `at` into a container. `parts` are 1-D uint8 tensors, `codec_fields` has at most
    16 bytes, and `digest` is the digest of the codec tables ("" without tables).
    """
    head = LAYER_HEADER.pack(
        LAYER_MAGIC, CONTAINER_VERSION, at, bytes.fromhex(digest), codec_fields, len(parts)
    )
    head += b"".join(part.numel().to_bytes(4, "little") for part in parts)
    front = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(parts[0].device)
    return torch.cat([front, *parts])


def unpack(blob: Tensor, digest: str) -> tuple[int, bytes, tuple[Tensor, ...]]:
    """Unpack a container. `digest` is the digest of the codec tables, or "" without tables.

    Returns:
        The index of the layer, the 16 bytes of codec fields, and the parts as views of `blob`.

    Raises:
        OtherTables: The container was packed with other tables or by another version.
    """
    front = blob[: LAYER_HEADER.size + 4 * 255].cpu().numpy().tobytes()
    _, version, at, _, codec_fields, n_parts = LAYER_HEADER.unpack_from(front)
    if version != CONTAINER_VERSION:
        raise OtherTables(
            f"The layer has format version {version}, but only {CONTAINER_VERSION} is supported."
            " Use the version of ragfuse that wrote the layer, or delete the entry."
        )
    if (found := tables_of(blob)) != digest:
        raise OtherTables(
            "The layer was encoded with other codec tables: the digest of its tables is"
            f" {found or 'none'}, and the digest of this codec's tables is {digest or 'none'}."
        )
    lengths = struct.unpack_from(f"<{n_parts}I", front, LAYER_HEADER.size)
    body = blob[LAYER_HEADER.size + 4 * n_parts :]
    return at, codec_fields, torch.split(body, list(lengths))


def tables_of(blob: Tensor) -> str:
    """Return the digest of the codec tables that a container needs; "" if it needs no tables."""
    tables = blob[TABLES].cpu().numpy().tobytes()
    return tables.hex() if any(tables) else ""


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 `values` to `dtype`. Values that quantisation moved out of range are clamped."""
    if dtype in (torch.float32, torch.bfloat16):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
