"""The container of every packed (int8 or CacheGen) layer: what a codec must know of its own bytes.

Layout, little-endian: magic, version, layer of the model, digest of the tables (zeros: none), 16
bytes of the codec's own, the number of parts and their lengths, the parts. The store keeps shapes
and a checksum beside it, and hands out only bytes that fit them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

LAYER_MAGIC: Final = b"RFKV"
CONTAINER_VERSION: Final = 2
LAYER_HEADER: Final = struct.Struct("<4sBxH8s16sB")
TABLES: Final = slice(8, 16)


class OtherTables(ValueError):
    """A layer that is not damaged, but packed with other tables, by another version or with other
    bins.

    Such a layer is left in the store, and not decoded here.
    """


def pack(at: int, digest: str, codec_fields: bytes, parts: Sequence[Tensor]) -> Tensor:
    """Put parts into a container.

    Args:
        at: Index of the layer in the model.
        digest: Digest of the codec tables; "" for none.
        codec_fields: At most 16 bytes of the codec's own.
        parts: uint8, 1-D.

    Returns:
        uint8 `[nbytes]` on the device of the first part.
    """
    head = LAYER_HEADER.pack(
        LAYER_MAGIC, CONTAINER_VERSION, at, bytes.fromhex(digest), codec_fields, len(parts)
    )
    head += b"".join(part.numel().to_bytes(4, "little") for part in parts)
    front = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(parts[0].device)
    return torch.cat([front, *parts])


def unpack(blob: Tensor, digest: str) -> tuple[int, bytes, tuple[Tensor, ...]]:
    """Open a container that was packed with the tables of a digest ("" for none).

    Returns:
        The layer's index in the model, the codec's own 16 bytes, and the parts as views.

    Raises:
        OtherTables: It was packed with other tables or by another version.
    """
    front = blob[: LAYER_HEADER.size + 4 * 255].cpu().numpy().tobytes()
    _, version, at, _, codec_fields, n_parts = LAYER_HEADER.unpack_from(front)
    if version != CONTAINER_VERSION:
        raise OtherTables(
            f"The layer has format version {version}, this ragfuse reads {CONTAINER_VERSION}."
        )
    if (found := tables_of(blob)) != digest:
        raise OtherTables(
            f"The layer was packed with codec tables {found or 'none'}, not with"
            f" {digest or 'none'}."
        )
    lengths = struct.unpack_from(f"<{n_parts}I", front, LAYER_HEADER.size)
    body = blob[LAYER_HEADER.size + 4 * n_parts :]
    return at, codec_fields, torch.split(body, list(lengths))


def tables_of(blob: Tensor) -> str:
    """Return the digest of the tables that a container was packed with; "" for none."""
    tables = blob[TABLES].cpu().numpy().tobytes()
    return tables.hex() if any(tables) else ""


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 `values` to `dtype`, clamped to its range, which rounding may have left."""
    if dtype in (torch.float32, torch.bfloat16):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
