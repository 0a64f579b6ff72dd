"""The file format of an entry: a header, then layer after layer, so that a layer is one read at a known offset.

    magic 8 · version u32 · header length u32 · BLAKE3 of the header 32 · header JSON {key, meta} · layers

Header and layers begin at multiples of 64 bytes with zeros in between; numbers are little-endian. Every byte is
checked, by a checksum or for being zero. `Header` parses any bytes, `ChunkFile` reads a file.
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
from ragfuse.store.plainfile import check_there, open_plain
from ragfuse.store.tier import LAYER_ALIGNMENT, EntryMeta, parsed
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


def layer_offsets(header_nbytes: int, meta: EntryMeta) -> list[int]:
    """Return the offset of each layer in bytes, and last the size of the whole entry."""
    offsets = [_aligned(header_nbytes)]
    for layer in meta.layers:
        offsets.append(offsets[-1] + _aligned(layer.nbytes))
    return offsets


def pieces(header: bytes, blobs: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a whole entry in order: the header, then each layer and its padding."""
    yield header
    for blob in blobs:
        yield blob.cpu().contiguous().numpy().data
        yield bytes(_aligned(blob.numel()) - blob.numel())


class NotAnEntryError(ValueError):
    """The bytes are not a damaged entry but something else, such as a proxy's error page or somebody else's file."""


def header_nbytes(begin: bytes | bytearray) -> int:
    """Return the padded length of an entry's header, from its first bytes; raise ValueError if it is none."""
    return _aligned(_text_end(begin))


def _text_end(begin: bytes | bytearray) -> int:
    """Return the offset at which the header's JSON ends."""
    if not begin.startswith(FILE_MAGIC[: len(begin)]):
        raise NotAnEntryError("not a chunk file")
    if len(begin) < _FIXED.size:
        raise ValueError("the file ends too early")
    _, version, nbytes, _ = _FIXED.unpack_from(begin)
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format version {version}, not {FORMAT_VERSION}")
    return int(_FIXED.size + min(nbytes, _MAX_HEADER_NBYTES))


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an entry.

    Args:
        key: The entry's key.
        meta: Its description.
        offsets: Where each layer begins in bytes, and last the size of the whole entry.
    """

    key: ChunkKey
    meta: EntryMeta
    offsets: Sequence[int]

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Header:
        """Parse the header at the beginning of `data`; raise ValueError if it is incomplete, damaged or no header."""
        end, nbytes = _text_end(data), header_nbytes(data)
        text = bytes(data[_FIXED.size : end])
        if len(data) < nbytes:
            raise ValueError("the file ends too early")
        if any(data[end:nbytes]):
            raise ValueError("the padding of the header is not zero")
        if blake3(text).digest() != _FIXED.unpack_from(data)[3]:
            raise ValueError("checksum of the header does not match")
        try:
            fields = parsed(text)
            key, meta = ChunkKey.parse(fields["key"]), EntryMeta.from_json(fields["meta"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header cannot be read: {error!r}") from error
        return cls(key, meta, layer_offsets(nbytes, meta))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry."""
        return self.offsets[-1]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the byte range of `count` layers from `first` on, including the padding of the last."""
        return self.offsets[first], self.offsets[first + count]

    def cut(self, span: Tensor, first: int, count: int, *, verify: bool) -> list[Tensor]:
        """Cut the bytes of a `span` into its layers.

        Args:
            span: The bytes of that range, uint8.
            first: The first layer.
            count: How many layers.
            verify: Whether to check the layers' checksums and the padding.

        Returns:
            The layers, uint8 `[nbytes]` each, as views of `span`.

        Raises:
            ValueError: A check failed.
        """
        blobs = []
        for layer in range(first, first + count):
            lo, hi = self.offsets[layer] - self.offsets[first], self.offsets[layer + 1] - self.offsets[first]
            end = lo + self.meta.layers[layer].nbytes
            blobs.append(span[lo:end])
            if verify and checksum(blobs[-1]) != self.meta.layers[layer].checksum:
                raise ValueError(f"checksum of layer {layer} does not match")
            if verify and end < hi and span[end:hi].any():
                raise ValueError(f"the padding of layer {layer} is not zero")
        return blobs


def write_chunk(path: Path, header: bytes, blobs: Sequence[Tensor]) -> None:
    """Write a new file at `path`, synced to the medium when this returns."""
    fd = open_file(path, os.O_WRONLY | os.O_EXCL)
    try:
        for piece in pieces(header, blobs):
            _write_all(fd, piece)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class ChunkFile:
    """The open file of an entry.

    The file is closed when the last reference to this object is gone, so a cache may drop it while others read.

    Raises:
        OSError: It cannot be opened or read.
        ValueError: It is no plain file, or not a complete entry.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = open_plain(path)
        self.nbytes = os.fstat(self._fd).st_size
        self._header = self._parse()
        if self.nbytes != self._header.nbytes:
            raise ValueError(f"it should have {self._header.nbytes} bytes, but has {self.nbytes}")

    @property
    def key(self) -> ChunkKey:
        """The entry's key."""
        return self._header.key

    @property
    def meta(self) -> EntryMeta:
        """The entry's description."""
        return self._header.meta

    @property
    def is_unlinked(self) -> bool:
        """Whether the file was deleted or replaced since it was opened."""
        return os.fstat(self._fd).st_nlink == 0

    def expect(self, first: int, count: int) -> None:
        """Ask the operating system to prefetch these layers, where it supports that; errors are ignored."""
        if hasattr(os, "posix_fadvise") and 0 <= first < first + count <= len(self.meta.layers):
            begin, end = self._header.span(first, count)
            with suppress(OSError):
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read(self, first: int, count: int = 1, *, verify: bool = True) -> list[Tensor]:
        """Read `count` layers from `first` on into one new allocation; return uint8 `[nbytes]` each.

        They are read about a megabyte at a time; each part is checked while the system prefetches the next.
        """
        self.expect(first, count)
        begin, end = self._header.span(first, count)
        check_there(self._fd, begin, end)
        whole, blobs = torch.empty(end - begin, dtype=torch.uint8), list[Tensor]()
        a_piece = max(1, FILE_READ_NBYTES // max(layer.nbytes for layer in self.meta.layers[first : first + count]))
        for at in range(first, first + count, a_piece):
            some = min(a_piece, first + count - at)
            lo, hi = self._header.span(at, some)
            piece = whole[lo - begin : hi - begin]
            _read_all(self._fd, piece.numpy().data, lo)
            blobs += self._header.cut(piece, at, some, verify=verify)
        return blobs

    def _parse(self) -> Header:
        fixed = bytearray(_FIXED.size)
        _read_all(self._fd, fixed, 0)
        if header_nbytes(fixed) > self.nbytes:
            raise ValueError("the file ends too early")
        head = bytearray(header_nbytes(fixed))
        _read_all(self._fd, head, 0)
        return Header.parse(head)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _read_all(fd: int, buffer: bytearray | memoryview, offset: int) -> None:
    """Fill `buffer` from `offset` on; raise ValueError if the file ends too early."""
    view = memoryview(buffer)
    while view:
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise ValueError("the file ends too early")
        view, offset = view[n:], offset + n
