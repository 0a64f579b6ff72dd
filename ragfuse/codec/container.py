"""The container of every packed (int8 or CacheGen) layer: a header that is checked before anything is decoded.

Layout, little-endian: magic, version, kind of codec, layer of the model, digest of the tables (zeros: none), both
shapes, 16 bytes of the codec's own, the number of parts and their lengths, a checksum over all the rest, the parts.
The decoder states which kind, shapes and tables it expects. Lengths that do not add up, and sizes that no layer has,
are refused before memory is allocated for them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from ragfuse.codec.codec import LayerMeta
from ragfuse.types.kv import LayerKV

LAYER_MAGIC: Final = b"RFKV"
CONTAINER_VERSION: Final = 1
LAYER_HEADER: Final = struct.Struct("<4sBBH8sHIHHIH16sB")
TABLES: Final = slice(8, 16)
SUM_NBYTES: Final = 8
MAX_PARTS: Final = 16
MAX_LAYER: Final = 65_535
MAX_VALUES: Final = 1 << 28
"""Most numbers in the keys, or in the values, of one layer."""
MAX_EXPANSION: Final = 64
"""Most numbers per packed byte, for layers of more than `FEW_VALUES` numbers. KV of a model never packs as well; bytes
that claim to would only make us allocate memory."""
FEW_VALUES: Final = 1 << 20


class OtherTables(ValueError):
    """A layer that is not damaged, but packed with other tables, by another version or with other bins.

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


def pack(kind: int, at: int, digest: str, meta: LayerMeta, codec_fields: bytes, parts: Sequence[Tensor]) -> Tensor:
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

    Raises:
        ValueError: The layer is too large, or `at` or a shape does not fit into the header.
    """
    check_size(meta)
    if not 0 <= at <= MAX_LAYER:
        raise ValueError(f"The index of a layer must be 0 to {MAX_LAYER}, found {at}.")
    shapes = (*meta.key_shape, *meta.value_shape)
    try:
        head = LAYER_HEADER.pack(
            *(
                LAYER_MAGIC,
                CONTAINER_VERSION,
                kind,
                at,
                bytes.fromhex(digest or "00" * 8),
                *shapes,
                codec_fields,
                len(parts),
            )
        )
    except struct.error as error:
        raise ValueError(f"Shapes {meta.key_shape} and {meta.value_shape} do not fit into a header.") from error
    head += b"".join(part.numel().to_bytes(4, "little") for part in parts)
    body = torch.cat([part.reshape(-1) for part in parts])
    _check_spread(meta, body.numel())
    front = head + _sum(head, body)
    return torch.cat([torch.frombuffer(bytearray(front), dtype=torch.uint8).to(body.device), body])


def unpack(blob: Tensor, kind: int, digest: str, meta: LayerMeta) -> Packed:
    """Open a container, and check that it is what the caller expects (arguments as in `pack`).

    Raises:
        OtherTables: It was packed with other tables or by another version.
        ValueError: It is damaged, or was packed by another codec or with other shapes.
    """
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() < LAYER_HEADER.size + SUM_NBYTES:
        raise ValueError(f"Not a packed layer: {tuple(blob.shape)} {blob.dtype}.")
    check_size(meta)
    _check_spread(meta, blob.numel())
    front = blob[: LAYER_HEADER.size + 4 * MAX_PARTS + SUM_NBYTES].cpu().numpy().tobytes()
    magic, version, found_kind, at, tables, *shapes, codec_fields, n_parts = LAYER_HEADER.unpack_from(front)
    if magic != LAYER_MAGIC:
        raise ValueError(f"Not a packed layer: it should begin with {LAYER_MAGIC!r}, found {magic!r}.")
    if version != CONTAINER_VERSION:
        raise OtherTables(f"The layer has format version {version}, this ragfuse reads {CONTAINER_VERSION}.")
    if found_kind != kind:
        raise ValueError(f"The layer was packed by codec {found_kind}, not by codec {kind}.")
    if tuple(shapes) != (*meta.key_shape, *meta.value_shape):
        raise ValueError(f"The layer should have shapes {meta.key_shape} and {meta.value_shape}, found {shapes}.")
    parts = _parts(blob, front, n_parts)
    if tables != bytes.fromhex(digest or "00" * 8):
        raise OtherTables(f"The layer was packed with codec tables {tables.hex()}, not with {digest or 'none'}.")
    return Packed(at, codec_fields, parts)


def tables_of(blob: Tensor) -> str:
    """Return the digest of the tables that a container was packed with; "" for none, or if `blob` is no container."""
    front = blob[: TABLES.stop].cpu().numpy().tobytes()
    return front[TABLES].hex() if front.startswith(LAYER_MAGIC) and any(front[TABLES]) else ""


def _parts(blob: Tensor, front: bytes, n_parts: int) -> tuple[Tensor, ...]:
    begins = LAYER_HEADER.size + 4 * n_parts + SUM_NBYTES
    if not 0 < n_parts <= MAX_PARTS or blob.numel() < begins:
        raise ValueError(f"The entry is damaged: {n_parts} parts cannot be in its {blob.numel()} bytes.")
    lengths = struct.unpack_from(f"<{n_parts}I", front, LAYER_HEADER.size)
    body = blob[begins:]
    if sum(lengths) != body.numel():
        raise ValueError(f"The parts should have {sum(lengths)} bytes, found {body.numel()}.")
    head, total = front[: begins - SUM_NBYTES], front[begins - SUM_NBYTES : begins]
    if _sum(head, body) != total:
        raise ValueError("The checksum of a packed layer does not match: it is damaged.")
    return tuple(torch.split(body, list(lengths)))


def check_size(meta: LayerMeta) -> None:
    """Raise ValueError if a layer has more than `MAX_VALUES` keys or values."""
    if max(prod(meta.key_shape), prod(meta.value_shape)) > MAX_VALUES:
        raise ValueError(
            f"A layer has at most {MAX_VALUES:,} keys or values, found {meta.key_shape}, {meta.value_shape}."
        )


def _check_spread(meta: LayerMeta, nbytes: int) -> None:
    """Raise ValueError if a layer has more numbers than `nbytes` packed bytes may hold."""
    limit, found = max(FEW_VALUES, MAX_EXPANSION * nbytes), max(prod(meta.key_shape), prod(meta.value_shape))
    if found > limit:
        raise ValueError(f"{nbytes:,} bytes hold at most {limit:,} keys or values, found {found:,}.")


def _sum(head: bytes, body: Tensor) -> bytes:
    hasher = blake3(head)
    hasher.update(body.cpu().contiguous().numpy().data)
    return hasher.digest(SUM_NBYTES)


def one_dtype(layer: LayerKV) -> None:
    """Raise ValueError if keys and values have different dtypes."""
    if layer.keys.dtype != layer.values.dtype:
        raise ValueError(f"Keys are {layer.keys.dtype}, values {layer.values.dtype}: both must have the same dtype.")


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 `values` to `dtype`, clamped to its range, which rounding may have left."""
    if dtype in (torch.float32, torch.bfloat16):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
