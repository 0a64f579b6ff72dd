"""What stands around every packed layer: a header that says whose bytes these are, checked before anything is built.

Little-endian. Magic, version, kind of codec, layer of the model, digest of the tables (zeros: none), both shapes,
16 bytes that are the codec's own, how many parts follow and the length of each, a checksum over all the rest. Whoever
decodes names the kind, the shapes and the tables that it wants; a length that does not add up or a size that no layer
has is refused before a byte is allocated for it.
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
"""Keys or values of one layer hold no more numbers than this."""
MAX_EXPANSION: Final = 64
FEW_VALUES: Final = 1 << 20
"""And no more than so many for each byte that they are packed into, unless they are few: none that a model computes
pack as well, and what does only asks for memory."""


class OtherTables(ValueError):
    """The layer is not damaged, but packed otherwise than here: with other tables, by another version or in other bins.

    It is to be left alone, and not read.
    """


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed layer opened: which layer of the model it is, its codec's own 16 bytes, its parts as views."""

    at: int
    own: bytes
    parts: tuple[Tensor, ...]


def pack(kind: int, at: int, digest: str, meta: LayerMeta, own: bytes, parts: Sequence[Tensor]) -> Tensor:
    """uint8 [nbytes] of `parts` (uint8, 1-D) behind their header, on the device of the first."""
    check_size(meta)
    if not 0 <= at <= MAX_LAYER:
        raise ValueError(f"A layer from 0 to {MAX_LAYER} wanted, {at} found.")
    shapes = (*meta.key_shape, *meta.value_shape)
    try:
        head = LAYER_HEADER.pack(
            *(LAYER_MAGIC, CONTAINER_VERSION, kind, at, bytes.fromhex(digest or "00" * 8), *shapes, own, len(parts))
        )
    except struct.error as error:
        raise ValueError(f"Shapes {meta.key_shape} and {meta.value_shape} do not fit into a header.") from error
    head += b"".join(part.numel().to_bytes(4, "little") for part in parts)
    body = torch.cat([part.reshape(-1) for part in parts])
    _check_spread(meta, body.numel())
    front = head + _sum(head, body)
    return torch.cat([torch.frombuffer(bytearray(front), dtype=torch.uint8).to(body.device), body])


def unpack(blob: Tensor, kind: int, digest: str, meta: LayerMeta) -> Packed:
    """The parts of a packed layer; ValueError if it is another codec's, has other tables or shapes, or is damaged."""
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() < LAYER_HEADER.size + SUM_NBYTES:
        raise ValueError(f"A packed layer wanted, {tuple(blob.shape)} {blob.dtype} found.")
    check_size(meta)
    _check_spread(meta, blob.numel())
    front = blob[: LAYER_HEADER.size + 4 * MAX_PARTS + SUM_NBYTES].cpu().numpy().tobytes()
    magic, version, found_kind, at, tables, *shapes, own, n_parts = LAYER_HEADER.unpack_from(front)
    if magic != LAYER_MAGIC:
        raise ValueError(f"{LAYER_MAGIC!r} wanted, {magic!r} found.")
    if version != CONTAINER_VERSION:
        raise OtherTables(f"A layer of version {CONTAINER_VERSION} wanted, one of version {version} found.")
    if found_kind != kind:
        raise ValueError(f"A layer packed by codec {kind} wanted, one by codec {found_kind} found.")
    if tuple(shapes) != (*meta.key_shape, *meta.value_shape):
        raise ValueError(f"Shapes {meta.key_shape} and {meta.value_shape} wanted, {shapes} found.")
    parts = _parts(blob, front, n_parts)
    if tables != bytes.fromhex(digest or "00" * 8):
        raise OtherTables(f"A layer packed with tables {digest or 'none'} wanted, one with {tables.hex()} found.")
    return Packed(at, own, parts)


def tables_of(blob: Tensor) -> str:
    """The digest of the tables that a packed layer names; "" for none, and for what is no packed layer."""
    front = blob[: TABLES.stop].cpu().numpy().tobytes()
    return front[TABLES].hex() if front.startswith(LAYER_MAGIC) and any(front[TABLES]) else ""


def _parts(blob: Tensor, front: bytes, n_parts: int) -> tuple[Tensor, ...]:
    begins = LAYER_HEADER.size + 4 * n_parts + SUM_NBYTES
    if not 0 < n_parts <= MAX_PARTS or blob.numel() < begins:
        raise ValueError(f"{n_parts} parts do not fit into {blob.numel()} bytes.")
    lengths = struct.unpack_from(f"<{n_parts}I", front, LAYER_HEADER.size)
    body = blob[begins:]
    if sum(lengths) != body.numel():
        raise ValueError(f"{sum(lengths)} bytes of parts wanted, {body.numel()} found.")
    head, total = front[: begins - SUM_NBYTES], front[begins - SUM_NBYTES : begins]
    if _sum(head, body) != total:
        raise ValueError("The checksum of a packed layer does not match: it is damaged.")
    return tuple(torch.split(body, list(lengths)))


def check_size(meta: LayerMeta) -> None:
    """ValueError for a layer of more numbers than any has."""
    if max(prod(meta.key_shape), prod(meta.value_shape)) > MAX_VALUES:
        raise ValueError(f"At most {MAX_VALUES:,} keys or values wanted, {meta.key_shape}, {meta.value_shape} found.")


def _check_spread(meta: LayerMeta, nbytes: int) -> None:
    """ValueError for more numbers than so many bytes may stand for."""
    most, found = max(FEW_VALUES, MAX_EXPANSION * nbytes), max(prod(meta.key_shape), prod(meta.value_shape))
    if found > most:
        raise ValueError(f"At most {most:,} keys or values in {nbytes:,} bytes wanted, {found:,} found.")


def _sum(head: bytes, body: Tensor) -> bytes:
    hasher = blake3(head)
    hasher.update(body.cpu().contiguous().numpy().data)
    return hasher.digest(SUM_NBYTES)


def one_dtype(layer: LayerKV) -> None:
    """ValueError for a layer whose keys and values are of two dtypes."""
    if layer.keys.dtype != layer.values.dtype:
        raise ValueError(f"Keys are {layer.keys.dtype}, values {layer.values.dtype}: a layer has one dtype.")


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `values` in `dtype`, what lies outside it at its ends: rounding may have pushed it there."""
    if dtype in (torch.float32, torch.bfloat16):
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
