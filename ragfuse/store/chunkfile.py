"""The format of an entry: a header, then layer after layer, so that some layers are one read at a
known offset.

    magic 8 · version u32 · header length u32 · BLAKE3 of the header 32 · header JSON {key, meta} ·
    layers

Header and layers begin at multiples of 64 bytes with zeros in between; numbers are little-endian.
Header and layers have checksums.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct

from blake3 import blake3
from pydantic import TypeAdapter
from torch import Tensor

from ragfuse.codec import checksum
from ragfuse.store.tier import EntryMeta, aligned
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey

FILE_MAGIC = b"RAGFUSE\0"
_FIXED = Struct("<8sII32s")
_META = TypeAdapter(EntryMeta)
MAX_HEADER_NBYTES = 1 << 22


def pack_header(key: ChunkKey, meta: EntryMeta) -> bytes:
    """Return all bytes before the first layer, padded."""
    text = json.dumps({"key": str(key), "meta": _META.dump_json(meta).decode()}).encode()
    head = _FIXED.pack(FILE_MAGIC, FORMAT_VERSION, len(text), blake3(text).digest()) + text
    return head.ljust(aligned(len(head)), b"\0")


def pieces(header: bytes, blobs: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a whole entry in order: the header, then each layer and its padding."""
    yield header
    for blob in blobs:
        yield blob.cpu().contiguous().numpy().data
        yield bytes(aligned(blob.numel()) - blob.numel())


def header_nbytes(begin: bytes | bytearray) -> int:
    """Return the padded length of an entry's header, from its first bytes; raise ValueError if it
    is none.
    """
    if len(begin) < _FIXED.size:
        raise ValueError("it ends too early")
    magic, version, nbytes, _ = _FIXED.unpack_from(begin)
    if magic != FILE_MAGIC or version != FORMAT_VERSION:
        raise ValueError(f"not an entry of format version {FORMAT_VERSION}")
    return aligned(_FIXED.size + min(nbytes, MAX_HEADER_NBYTES))


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
        """Parse the header at the beginning of `data`; raise ValueError if it is incomplete,
        damaged or no header.
        """
        end = header_nbytes(data)
        _, _, nbytes, digest = _FIXED.unpack_from(data)
        text = bytes(data[_FIXED.size : _FIXED.size + nbytes])
        if blake3(text).digest() != digest:
            raise ValueError("checksum of the header does not match")
        fields = json.loads(text)
        meta = _META.validate_json(fields["meta"])
        offsets = accumulate((aligned(layer.nbytes) for layer in meta.layers), initial=end)
        return cls(ChunkKey.parse(fields["key"]), meta, list(offsets))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry."""
        return self.offsets[-1]

    def span(self, wanted: range) -> tuple[int, int]:
        """Return the byte range of some pieces, including the padding of the last."""
        return self.offsets[wanted.start], self.offsets[wanted.stop]

    def cut(self, span: Tensor, wanted: range) -> list[Tensor]:
        """Cut the bytes of a `span`, uint8, into its pieces, which are views of it; ValueError for
        a damaged one.
        """
        blobs = []
        for at in wanted:
            begin = self.offsets[at] - self.offsets[wanted.start]
            blob = span[begin : begin + self.meta.layers[at].nbytes]
            if checksum(blob) != self.meta.layers[at].checksum:
                raise ValueError(f"checksum of layer {at} does not match")
            blobs.append(blob)
        return blobs
