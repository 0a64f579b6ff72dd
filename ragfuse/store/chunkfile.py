"""One entry as a file: header, then layer after layer, so that a layer is one read at a known offset.

    magic 8 · version u32 · header length u32 · BLAKE3 of the header 32 · header JSON {key, meta} · layers

Header and layers begin at multiples of 64 bytes, little-endian numbers. Where files lie is `disk.py`'s business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

import torch
from blake3 import blake3
from torch import Tensor

from ragfuse.codec import checksum
from ragfuse.core import FORMAT_VERSION, ChunkKey
from ragfuse.store.tier import EntryMeta

MAGIC = b"RAGFUSE\0"
ALIGNMENT = 64
_FIXED = Struct("<8sII32s")
_MAX_HEADER_NBYTES = 1 << 24


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pack_header(key: ChunkKey, meta: EntryMeta) -> bytes:
    """Everything before the first layer, padded."""
    text = json.dumps({"key": str(key), "meta": meta.to_json()}).encode()
    head = _FIXED.pack(MAGIC, FORMAT_VERSION, len(text), blake3(text).digest()) + text
    return head.ljust(_aligned(len(head)), b"\0")


def layer_offsets(header_nbytes: int, meta: EntryMeta) -> list[int]:
    """Where each layer begins, and last the size of the whole file."""
    offsets = [_aligned(header_nbytes)]
    for layer in meta.layers:
        offsets.append(offsets[-1] + _aligned(layer.nbytes))
    return offsets


def write_chunk(path: Path, header: bytes, blobs: Sequence[Tensor]) -> None:
    """A new file at `path`, readable by this user alone, on the medium when this returns."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, header)
        for blob in blobs:
            _write_all(fd, blob.cpu().contiguous().numpy().data)
            _write_all(fd, bytes(_aligned(blob.numel()) - blob.numel()))
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class ChunkFile:
    """An open entry. OSError if it cannot be opened or read, ValueError if it is not a whole entry.

    The file is closed when the last reader lets go of this object, so it may be dropped from a cache at any time.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.nbytes = os.fstat(self._fd).st_size
        self.key, self.meta, self._offsets = self._header()
        if self.nbytes != self._offsets[-1]:
            raise ValueError(f"{self._offsets[-1]} bytes wanted, {self.nbytes} found")

    @property
    def is_unlinked(self) -> bool:
        """Whether the name is gone: deleted or replaced since it was opened."""
        return os.fstat(self._fd).st_nlink == 0

    def read(self, first: int, count: int = 1, *, verify: bool = True) -> list[Tensor]:
        """`count` layers from `first` on as uint8 [nbytes] each, newly allocated together, by one read."""
        begin, chosen = self._offsets[first], range(first, first + count)
        last = self._offsets[chosen[-1]] + self.meta.layers[chosen[-1]].nbytes
        whole = torch.empty(last - begin, dtype=torch.uint8)
        _read_all(self._fd, whole.numpy().data, begin)
        blobs = [whole.narrow(0, self._offsets[i] - begin, self.meta.layers[i].nbytes) for i in chosen]
        for layer, blob in zip(chosen, blobs, strict=True):
            if verify and checksum(blob) != self.meta.layers[layer].checksum:
                raise ValueError(f"checksum of layer {layer} does not match")
        return blobs

    def _header(self) -> tuple[ChunkKey, EntryMeta, list[int]]:
        fixed = bytearray(_FIXED.size)
        _read_all(self._fd, fixed, 0)
        magic, version, nbytes, digest = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise ValueError("not a chunk file")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {FORMAT_VERSION} wanted, {version} found")
        text = bytearray(min(nbytes, _MAX_HEADER_NBYTES))
        _read_all(self._fd, text, _FIXED.size)
        if blake3(text).digest() != digest:
            raise ValueError("checksum of the header does not match")
        try:
            data = json.loads(text)
            key, meta = ChunkKey.parse(data["key"]), EntryMeta.from_json(data["meta"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"header not understood: {error!r}") from error
        return key, meta, layer_offsets(_FIXED.size + len(text), meta)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _read_all(fd: int, buffer: bytearray | memoryview, offset: int) -> None:
    """Fill `buffer` from `offset`; ValueError where the file ends before."""
    view = memoryview(buffer)
    while view:
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise ValueError("the file ends too early")
        view, offset = view[n:], offset + n
