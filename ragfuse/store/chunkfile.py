"""The format of an entry: a header, then layer after layer, so that some layers are one read at a known offset.

    magic 8 · version u32 · header length u32 · BLAKE3 of the header 32 · header JSON {key, meta} · layers

Header and layers begin at multiples of 64 bytes with zeros in between; numbers are little-endian. Header and layers
have checksums. `Header` parses any bytes, `ChunkFile` reads a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import torch
from blake3 import blake3
from torch import Tensor

from ragfuse.codec import checksum
from ragfuse.store.access import open_file
from ragfuse.store.tier import LAYER_ALIGNMENT, EntryMeta
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey

FILE_MAGIC = b"RAGFUSE\0"
FILE_READ_NBYTES = 1 << 20
"""Bytes, about, of one read of a file's layers."""
_FIXED = Struct("<8sII32s")
_MAX_HEADER_NBYTES = 1 << 22


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LAYER_ALIGNMENT) * LAYER_ALIGNMENT


def pack_header(key: ChunkKey, meta: EntryMeta) -> bytes:
    """Return all bytes before the first layer, padded."""
    text = json.dumps({"key": str(key), "meta": meta.to_json()}).encode()
    head = _FIXED.pack(FILE_MAGIC, FORMAT_VERSION, len(text), blake3(text).digest()) + text
    return head.ljust(_aligned(len(head)), b"\0")


def pieces(header: bytes, blobs: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a whole entry in order: the header, then each layer and its padding."""
    yield header
    for blob in blobs:
        yield blob.cpu().contiguous().numpy().data
        yield bytes(_aligned(blob.numel()) - blob.numel())


def header_nbytes(begin: bytes | bytearray) -> int:
    """Return the padded length of an entry's header, from its first bytes; raise ValueError if it is none."""
    if len(begin) < _FIXED.size:
        raise ValueError("it ends too early")
    magic, version, nbytes, _ = _FIXED.unpack_from(begin)
    if magic != FILE_MAGIC or version != FORMAT_VERSION:
        raise ValueError(f"not an entry of format version {FORMAT_VERSION}")
    return _aligned(_FIXED.size + min(nbytes, _MAX_HEADER_NBYTES))


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an entry.

    Args:
        key: The entry's key.
        meta: Its description.
        offsets: Where each piece begins in bytes, and last the size of the whole entry.
    """

    key: ChunkKey
    meta: EntryMeta
    offsets: Sequence[int]

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Header:
        """Parse the header at the beginning of `data`; raise ValueError if it is incomplete, damaged or no header."""
        end = header_nbytes(data)
        _, _, nbytes, digest = _FIXED.unpack_from(data)
        text = bytes(data[_FIXED.size : _FIXED.size + nbytes])
        if blake3(text).digest() != digest:
            raise ValueError("checksum of the header does not match")
        try:
            fields = json.loads(text)
            meta = EntryMeta.from_json(fields["meta"])
            return cls(ChunkKey.parse(fields["key"]), meta, offsets(end, meta))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header cannot be read: {error!r}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry."""
        return self.offsets[-1]

    def span(self, wanted: range) -> tuple[int, int]:
        """Return the byte range of some pieces, including the padding of the last."""
        return self.offsets[wanted.start], self.offsets[wanted.stop]

    def cut(self, span: Tensor, wanted: range) -> list[Tensor]:
        """Cut the bytes of a `span`, uint8, into its pieces, which are views of it; ValueError for a damaged one."""
        blobs = []
        for at in wanted:
            begin = self.offsets[at] - self.offsets[wanted.start]
            blob = span[begin : begin + self.meta.layers[at].nbytes]
            if checksum(blob) != self.meta.layers[at].checksum:
                raise ValueError(f"checksum of layer {at} does not match")
            blobs.append(blob)
        return blobs


def offsets(header_nbytes: int, meta: EntryMeta) -> list[int]:
    """Return the offset of each piece in bytes, and last the size of the whole entry."""
    found = [_aligned(header_nbytes)]
    for layer in meta.layers:
        found.append(found[-1] + _aligned(layer.nbytes))
    return found


def write_chunk(path: Path, header: bytes, blobs: Sequence[Tensor]) -> None:
    """Write a new file at `path`, synced to the medium when this returns."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_EXCL), "wb", buffering=0) as file:
        for piece in pieces(header, blobs):
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


class ChunkFile:
    """The open file of an entry.

    The file is closed when the last reference to this object is gone, so a cache may drop it while others read.

    Raises:
        OSError: It cannot be opened or read.
        ValueError: It is not a complete entry.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        fixed = self._file.read(_FIXED.size)
        rest = header_nbytes(fixed) - len(fixed)
        self.header = Header.parse(fixed + self._file.read(rest))
        if os.fstat(self._file.fileno()).st_size != self.header.nbytes:
            raise ValueError(f"it should have {self.header.nbytes} bytes, and has another number")

    @property
    def meta(self) -> EntryMeta:
        """The entry's description."""
        return self.header.meta

    @property
    def is_unlinked(self) -> bool:
        """Whether the file was deleted or replaced since it was opened."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def expect(self, wanted: range) -> None:
        """Ask the operating system to prefetch these pieces, where it supports that; errors are ignored."""
        begin, end = self.header.span(wanted)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read(self, wanted: range) -> list[Tensor]:
        """Read some pieces into one new allocation; return uint8 `[nbytes]` each.

        They are read about a megabyte at a time; each part is checked while the system prefetches the next.
        """
        self.expect(wanted)
        begin, end = self.header.span(wanted)
        whole, blobs = torch.empty(end - begin, dtype=torch.uint8), list[Tensor]()
        largest = max(layer.nbytes for layer in self.meta.layers[wanted.start : wanted.stop])
        step = max(1, FILE_READ_NBYTES // largest)
        for at in range(wanted.start, wanted.stop, step):
            some = range(at, min(at + step, wanted.stop))
            lo, hi = self.header.span(some)
            part = whole[lo - begin : hi - begin]
            self._read_all(part.numpy().data, lo)
            blobs += self.header.cut(part, some)
        return blobs

    def _read_all(self, view: memoryview, offset: int) -> None:
        while view:
            n = os.preadv(self._file.fileno(), [view], offset)
            if n == 0:
                raise ValueError("the file ends too early")
            view, offset = view[n:], offset + n
