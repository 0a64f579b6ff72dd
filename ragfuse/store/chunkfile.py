"""One entry as bytes: header, then layer after layer, so that a layer is one read at a known offset.

    magic 8 · version u32 · header length u32 · BLAKE3 of the header 32 · header JSON {key, meta} · layers

Header and layers begin at multiples of 64 bytes, zeros in between, little-endian numbers. Every byte is checked: by a
checksum, or for being zero. `Header` reads them from any bytes, `ChunkFile` from a file. Where files lie is `disk.py`'s
business, where objects do `objects.py`'s.
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
"""A file's layers are read in pieces of about so many bytes."""
_FIXED = Struct("<8sII32s")
_MAX_HEADER_NBYTES = 1 << 22


def _aligned(nbytes: int) -> int:
    return -(-nbytes // LAYER_ALIGNMENT) * LAYER_ALIGNMENT


def pack_header(key: ChunkKey, meta: EntryMeta) -> bytes:
    """Everything before the first layer, padded."""
    text = json.dumps({"key": str(key), "meta": meta.to_json()}).encode()
    head = _FIXED.pack(FILE_MAGIC, FORMAT_VERSION, len(text), blake3(text).digest()) + text
    return head.ljust(_aligned(len(head)), b"\0")


def layer_offsets(header_nbytes: int, meta: EntryMeta) -> list[int]:
    """Where each layer begins, and last the size of the whole entry."""
    offsets = [_aligned(header_nbytes)]
    for layer in meta.layers:
        offsets.append(offsets[-1] + _aligned(layer.nbytes))
    return offsets


def pieces(header: bytes, blobs: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a whole entry, piece by piece, layers with their padding."""
    yield header
    for blob in blobs:
        yield blob.cpu().contiguous().numpy().data
        yield bytes(_aligned(blob.numel()) - blob.numel())


class StrangeError(ValueError):
    """These bytes were never written here: a page of a proxy's, or a file of somebody else's."""


def header_nbytes(begin: bytes | bytearray) -> int:
    """How many bytes of an entry its header takes, padded, by its first bytes; ValueError if it is no entry."""
    return _aligned(_text_end(begin))


def _text_end(begin: bytes | bytearray) -> int:
    """Where the header's JSON ends."""
    if not begin.startswith(FILE_MAGIC[: len(begin)]):
        raise StrangeError("not a chunk file")
    if len(begin) < _FIXED.size:
        raise ValueError("the file ends too early")
    _, version, nbytes, _ = _FIXED.unpack_from(begin)
    if version != FORMAT_VERSION:
        raise ValueError(f"format version {FORMAT_VERSION} wanted, {version} found")
    return int(_FIXED.size + min(nbytes, _MAX_HEADER_NBYTES))


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the layers, and where each of them begins; the last offset is the size of the whole."""

    key: ChunkKey
    meta: EntryMeta
    offsets: Sequence[int]

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Header:
        """The header that `data` begins with; ValueError if it is not a whole one."""
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
            raise ValueError(f"header not understood: {error!r}") from error
        return cls(key, meta, layer_offsets(nbytes, meta))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry."""
        return self.offsets[-1]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Where `count` layers from `first` on begin, and where the padding of the last ends."""
        return self.offsets[first], self.offsets[first + count]

    def cut(self, span: Tensor, first: int, count: int, *, verify: bool) -> list[Tensor]:
        """`count` layers from `first` on, uint8 [nbytes] each, as views of the bytes of their `span`.

        ValueError if one, or what is between them, is not what was written, unless told not to `verify`.
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
    """A new file at `path`, on the medium when this returns."""
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
    """An open entry. OSError if it cannot be opened or read, ValueError if it is not a whole entry in a plain file.

    The file is closed when the last reader lets go of this object, so it may be dropped from a cache at any time.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = open_plain(path)
        self.nbytes = os.fstat(self._fd).st_size
        self._header = self._parse()
        if self.nbytes != self._header.nbytes:
            raise ValueError(f"{self._header.nbytes} bytes wanted, {self.nbytes} found")

    @property
    def key(self) -> ChunkKey:
        """Whose bytes these are."""
        return self._header.key

    @property
    def meta(self) -> EntryMeta:
        """What is said of them."""
        return self._header.meta

    @property
    def is_unlinked(self) -> bool:
        """Whether the name is gone: deleted or replaced since it was opened."""
        return os.fstat(self._fd).st_nlink == 0

    def expect(self, first: int, count: int) -> None:
        """Let the system begin to bring these layers, where it can be told to; one that refuses is no trouble."""
        if hasattr(os, "posix_fadvise") and 0 <= first < first + count <= len(self.meta.layers):
            begin, end = self._header.span(first, count)
            with suppress(OSError):
                os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read(self, first: int, count: int = 1, *, verify: bool = True) -> list[Tensor]:
        """`count` layers from `first` on as uint8 [nbytes] each, newly allocated together.

        They come in pieces, each checked while the system brings the next.
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
    """Fill `buffer` from `offset`; ValueError where the file ends before."""
    view = memoryview(buffer)
    while view:
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise ValueError("the file ends too early")
        view, offset = view[n:], offset + n
