"""The container of every packed (int8 or CacheGen) layer: a header that is checked before anything
is decoded.

Layout, little-endian: magic, version, kind of codec, layer of the model, digest of the tables
(zeros: none), both shapes, 16 bytes of the codec's own, the number of parts and their lengths, a
checksum over all the rest, the parts. What passes the checksum is what an encoder wrote, so that
decoders check nothing more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Final, TypeVar

import torch
from blake3 import blake3
from torch import Tensor
from zstandard import ZstdError

from ragfuse.codec.codec import LayerMeta
from ragfuse.types.kv import LayerKV

C = TypeVar("C")

LAYER_MAGIC: Final = b"RFKV"
CONTAINER_VERSION: Final = 1
LAYER_HEADER: Final = struct.Struct("<4sBBH8sHIHHIH16sB")
TABLES: Final = slice(8, 16)
SUM_NBYTES: Final = 8


class OtherTables(ValueError):
    """A layer that is not damaged, but packed with other tables, by another version or with other
    bins.

    Such a layer is left in the store, and not decoded here.
    """


@dataclass(frozen=True, slots=True)
class Packed:
    """An opened container.

    Args:
        at: Index of the layer in the model.
        codec_fields: The codec's own 16 bytes.
        parts: The parts, uint8, as views of the container.
    """

    at: int
    codec_fields: bytes
    parts: tuple[Tensor, ...]


def pack(
    kind: int, at: int, digest: str, meta: LayerMeta, codec_fields: bytes, parts: Sequence[Tensor]
) -> Tensor:
    """Put parts into a container.

    Args:
        kind: Number of the codec.
        at: Index of the layer in the model.
        digest: Digest of the codec tables; "" for none.
        meta: Shapes and dtype of the layer.
        codec_fields: 16 bytes of the codec's own.
        parts: uint8, 1-D.

    Returns:
        uint8 `[nbytes]` on the device of the first part.
    """
    shapes = (*meta.key_shape, *meta.value_shape)
    tables = bytes.fromhex(digest or "00" * 8)
    head = LAYER_HEADER.pack(
        LAYER_MAGIC, CONTAINER_VERSION, kind, at, tables, *shapes, codec_fields, len(parts)
    )
    head += b"".join(part.numel().to_bytes(4, "little") for part in parts)
    body = torch.cat([part.reshape(-1) for part in parts])
    front = head + _sum(head, body)
    return torch.cat([torch.frombuffer(bytearray(front), dtype=torch.uint8).to(body.device), body])


def unpack(blob: Tensor, kind: int, digest: str, meta: LayerMeta) -> Packed:
    """Open a container, and check that it is what the caller expects (arguments as in `pack`).

    Raises:
        OtherTables: It was packed with other tables or by another version.
        ValueError: It is damaged, or was packed by another codec or with other shapes.
    """
    front = blob[: LAYER_HEADER.size + 4 * 255 + SUM_NBYTES].cpu().numpy().tobytes()
    magic, version, found_kind, at, tables, *shapes, codec_fields, n_parts = (
        LAYER_HEADER.unpack_from(front)
    )
    if magic == LAYER_MAGIC and version != CONTAINER_VERSION:
        raise OtherTables(
            f"The layer has format version {version}, this ragfuse reads {CONTAINER_VERSION}."
        )
    if (magic, found_kind, *shapes) != (LAYER_MAGIC, kind, *meta.key_shape, *meta.value_shape):
        raise ValueError(
            f"Not a layer of codec {kind} and shapes {meta.key_shape}, {meta.value_shape}."
        )
    lengths = struct.unpack_from(f"<{n_parts}I", front, LAYER_HEADER.size)
    begins = LAYER_HEADER.size + 4 * n_parts
    body = blob[begins + SUM_NBYTES :]
    if _sum(front[:begins], body) != front[begins : begins + SUM_NBYTES] or sum(lengths) != len(
        body
    ):
        raise ValueError("The checksum of a packed layer does not match: it is damaged.")
    if tables != bytes.fromhex(digest or "00" * 8):
        raise OtherTables(
            f"The layer was packed with codec tables {tables.hex()}, not with {digest or 'none'}."
        )
    return Packed(at, codec_fields, tuple(torch.split(body, list(lengths))))


def refuses_damage(
    decode: Callable[[C, Tensor, LayerMeta], LayerKV],
) -> Callable[[C, Tensor, LayerMeta], LayerKV]:
    """Decorate a codec's `decode`, so that it raises ValueError for all bytes that no encoder has
    written.
    """

    @wraps(decode)
    def checked(codec: C, blob: Tensor, meta: LayerMeta) -> LayerKV:
        try:
            return decode(codec, blob, meta)
        except (IndexError, struct.error, ZstdError) as error:
            raise ValueError(f"The layer is damaged: {error}") from error

    return checked


def tables_of(blob: Tensor) -> str:
    """Return the digest of the tables that a container was packed with; "" for none, or if `blob`
    is no container.
    """
    front = blob[: TABLES.stop].cpu().numpy().tobytes()
    return front[TABLES].hex() if front.startswith(LAYER_MAGIC) and any(front[TABLES]) else ""


def _sum(head: bytes, body: Tensor) -> bytes:
    hasher = blake3(head)
    hasher.update(body.cpu().contiguous().numpy().data)
    return hasher.digest(SUM_NBYTES)


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 `values` to `dtype`, clamped to its range, which rounding may have left."""
    if dtype in (torch.float32, torch.bfloat16):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
