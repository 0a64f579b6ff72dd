"""The base class of tiers whose backend stores bytes by name: a folder, Redis or an object store.

An entry is one value, so one request can read consecutive layers. Format of the value:

    magic (8 bytes) · version (u32) · header length (u32) · BLAKE3 of the header (32 bytes) ·
    header (JSON {key, meta}) · layers

Header and layers are aligned to 64 bytes, padded with zeros, and have checksums. Numbers are
little-endian. After a failed request, the tier does not call the backend for some seconds.
"""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct
from typing import TypeVar

import torch
from blake3 import blake3
from pydantic import TypeAdapter
from torch import Tensor

from ragfuse.codec import checksum
from ragfuse.errors import StoreError
from ragfuse.process.shared import LRU
from ragfuse.store.tier import Breaker, EntryMeta, ReadLayers, Tier, aligned
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey
from ragfuse.types.kv import Entry
from ragfuse.types.sizes import UNLIMITED

FILE_MAGIC = b"RAGFUSE\0"
_FIXED = Struct("<8sII32s")
_META = TypeAdapter(EntryMeta)
MAX_HEADER_NBYTES = 1 << 22


def pack_header(key: ChunkKey, meta: EntryMeta) -> bytes:
    """Return the header of an entry, padded to the offset of the first layer."""
    text = json.dumps({"key": str(key), "meta": _META.dump_json(meta).decode()}).encode()
    head = _FIXED.pack(FILE_MAGIC, FORMAT_VERSION, len(text), blake3(text).digest()) + text
    return head.ljust(aligned(len(head)), b"\0")


def pieces(key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a whole entry in order: the header, then each layer and its padding."""
    yield pack_header(key, meta.sealed(blobs))
    for blob in blobs:
        yield blob.cpu().contiguous().numpy().data
        yield bytes(aligned(blob.numel()) - blob.numel())


def header_nbytes(begin: bytes | bytearray) -> int:
    """Return the padded length of the header that begins with `begin`. Raise ValueError if `begin`
    is not the beginning of a header.
    """
    if len(begin) < _FIXED.size:
        raise ValueError("the entry is truncated")
    magic, version, nbytes, _ = _FIXED.unpack_from(begin)
    if magic != FILE_MAGIC or version != FORMAT_VERSION:
        raise ValueError(f"the data is not an entry of format version {FORMAT_VERSION}")
    return aligned(_FIXED.size + min(nbytes, MAX_HEADER_NBYTES))


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of an entry: key, description, and the offset of each piece in bytes.

    A piece is one layer at one codec level. The final offset is the size of the entry.
    """

    key: ChunkKey
    meta: EntryMeta
    offsets: Sequence[int]

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Header:
        """Parse the header at the start of `data`. Raise ValueError if the header is damaged."""
        end = header_nbytes(data)
        _, _, nbytes, digest = _FIXED.unpack_from(data)
        text = bytes(data[_FIXED.size : _FIXED.size + nbytes])
        if blake3(text).digest() != digest:
            raise ValueError("the checksum of the header does not match")
        fields = json.loads(text)
        meta = _META.validate_json(fields["meta"])
        offsets = accumulate((aligned(layer.nbytes) for layer in meta.layers), initial=end)
        return cls(ChunkKey.parse(fields["key"]), meta, list(offsets))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole entry."""
        return self.offsets[-1]

    def span(self, wanted: range) -> tuple[int, int]:
        """Return the byte range (begin, end) of the pieces `wanted` and their padding."""
        return self.offsets[wanted.start], self.offsets[wanted.stop]

    def cut(self, span: Tensor, wanted: range) -> list[Tensor]:
        """Cut `span` into the pieces `wanted`, as views. Raise ValueError if a piece is damaged."""
        blobs = []
        for at in wanted:
            begin = self.offsets[at] - self.offsets[wanted.start]
            blob = span[begin : begin + self.meta.layers[at].nbytes]
            if checksum(blob) != self.meta.layers[at].checksum:
                raise ValueError(f"the checksum of layer {at} does not match")
            blobs.append(blob)
        return blobs


log = logging.getLogger("ragfuse.store")

_Found = TypeVar("_Found")
_HEAD_NBYTES = 1 << 11
"""Number of bytes that a tier reads to get a header. Grows to the longest header found so far."""
_BATCH = 256
_HEADERS = 1024


class BlobTier(Tier):
    """A tier whose backend stores bytes by name. Subclasses implement `_read`, `_write`, `_remove`.

    `_read` raises FileNotFoundError if a name has no value. If the backend fails, all three methods
    raise other exceptions.

    Args:
        name: Name of the tier.
        where: The backend's path or URL, for messages.
        capacity: Maximum bytes that the tier may store.
    """

    remote = True
    refusals: tuple[type[Exception], ...] = (PermissionError,)
    """Exception types that affect one request only. They cause no cool-down and are logged once."""

    def __init__(self, name: str, where: str, capacity: int = UNLIMITED) -> None:
        super().__init__(name, capacity)
        self._told = set[type[Exception]]()
        self._breaker = Breaker(f"Tier {name} ({where})")
        self._headers, self._closed = LRU[ChunkKey, Header](_HEADERS), False
        self._head_nbytes = _HEAD_NBYTES

    # the backend

    @abstractmethod
    def _read(self, name: str, begin: int, end: int) -> bytes | memoryview:
        """Return the bytes `begin` to `end` of a value, or fewer bytes if the value is shorter."""

    @abstractmethod
    def _write(self, key: ChunkKey, meta: EntryMeta, parts: Sequence[bytes | memoryview]) -> bool:
        """Store an entry as one value atomically; return False if there is no room."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> int:
        """Delete values; return the number deleted."""

    def _used(self) -> Mapping[str, float]:
        """Return {name: time of last use or write} of all values, in seconds since the epoch."""
        return {}

    def _heads(self, names: Sequence[str], nbytes: int) -> list[bytes | None]:
        """Return the first `nbytes` bytes of each value; None for a missing value."""
        found: list[bytes | None] = []
        for name in names:
            try:
                found.append(bytes(self._read(name, 0, nbytes)))
            except FileNotFoundError:
                found.append(None)
        return found

    def _missing(self, key: ChunkKey) -> None:
        """Called when a read finds no value for the entry `key`."""

    # the tier

    @property
    def answers(self) -> bool:
        """False after a failure of the backend, until a request succeeds again."""
        return not self._breaker.is_open

    def get(self, key: ChunkKey, layers: range, level: str | None = None) -> ReadLayers | None:
        """Read layers, in one request if the header is cached. A damaged entry is deleted."""
        return self._ask(f"read {key}", lambda: self._get(key, layers, level), None)

    def put(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store an entry as one value, atomically."""
        parts = list(pieces(key, meta, blobs))

        def write() -> bool:
            is_written = self._write(key, meta, parts)
            self._headers.discard([key])
            return is_written

        return self._ask(f"write {key}", write, False, changes=True)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries; return the number deleted."""
        doomed = list(dict.fromkeys(keys))
        self._headers.discard(doomed)
        names = list(map(str, doomed))
        return (
            self._ask("delete entries", lambda: self._remove(names), 0, changes=True)
            if names
            else 0
        )

    def stat(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the stored entries with these keys, looked up in batches of 256."""
        return self._ask("look up entries", lambda: self._stat(list(dict.fromkeys(keys))), {})

    def list(self) -> Sequence[Entry]:
        """Return all entries. This reads the header of every entry that has no cached header."""
        return self._ask("list entries", self._list, ())

    def close(self) -> None:
        """Close the tier."""
        self._closed = True

    # internal

    def _ask(
        self, doing: str, call: Callable[[], _Found], otherwise: _Found, *, changes: bool = False
    ) -> _Found:
        """Return the result of `call`. If the backend fails or is skipped, return `otherwise`."""
        if self._closed:
            return otherwise
        if not self._breaker.enter():
            self.counts.add("failed", int(changes))  # a skipped read is only a miss
            return otherwise
        try:
            found = call()
        except self.refusals as error:
            self._breaker.succeeded()
            self.counts.add("failed")
            if type(error) not in self._told:  # a server whose memory is full rejects every chunk
                self._told.add(type(error))
                log.warning("%s could not %s (logged once): %s", self._breaker.name, doing, error)
            return otherwise
        except StoreError:  # raised on opening; the tier is unusable
            raise
        except Exception as error:
            self.counts.add("failed")
            self._breaker.failed(doing, error)
            return otherwise
        self._breaker.succeeded()
        return found

    def _list(self) -> Sequence[Entry]:
        used = {key: when for name, when in self._used().items() if (key := _key(name)) is not None}
        return [*self._stat(list(used), used).values()]

    def _stat(
        self, keys: Sequence[ChunkKey], used: dict[ChunkKey, float] | None = None
    ) -> dict[ChunkKey, Entry]:
        found: dict[ChunkKey, Entry] = {}
        now = time.time()
        for lo in range(0, len(keys), _BATCH):
            batch = keys[lo : lo + _BATCH]
            known = {key: self._headers.get(key) for key in batch}
            # with cached headers, one byte per entry shows that it still exists
            nbytes = self._head_nbytes if None in known.values() else 1
            heads = self._heads(list(map(str, batch)), nbytes)
            for key, head in zip(batch, heads, strict=True):
                try:
                    header = (known[key] or self._header(key, head)) if head else None
                except FileNotFoundError:
                    continue
                except ValueError as error:
                    self._drop(key, error)
                    continue
                if header is not None:
                    last_used = (used or {}).get(key, now)
                    found[key] = header.meta.entry(key, self.name, header.nbytes, last_used)
        return found

    def _header(self, key: ChunkKey, head: bytes = b"") -> Header:
        """Read an entry's header. Raise FileNotFoundError if missing, ValueError if damaged."""
        head = head or bytes(self._read(str(key), 0, self._head_nbytes))
        missing = header_nbytes(head) - len(head)
        if missing > 0:
            head += self._read(str(key), len(head), len(head) + missing)
        header = Header.parse(head)
        if header.key != key:
            raise ValueError(f"the entry has another key, {header.key}")
        self._head_nbytes = max(self._head_nbytes, header.offsets[0])
        return self._headers.add(key, header)

    def _get(self, key: ChunkKey, layers: range, level: str | None) -> ReadLayers | None:
        """Read layers. If the cached header does not match the value, retry without the cache."""
        known = self._headers.get(key)
        try:
            header = known or self._header(key)
            wanted = header.meta.pieces(layers, level)
            if wanted is None:
                return None
            begin, end = header.span(wanted)
            data = self._read(str(key), begin, end)
            if len(data) < end - begin:
                raise ValueError("the entry is truncated")
            whole = torch.frombuffer(
                bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8
            )
            return header.meta, *header.cut(whole, wanted)
        except (FileNotFoundError, ValueError) as error:
            self._headers.discard([key])
            if known is not None:
                return self._get(key, layers, level)
            if isinstance(error, ValueError):
                self._drop(key, error)
            else:
                self._missing(key)
        return None

    def _drop(self, key: ChunkKey, why: ValueError) -> None:
        """Delete and count a damaged entry."""
        self._headers.discard([key])
        if self._remove([str(key)]):
            self._corrupt(key, why)

    def _corrupt(self, what: object, why: object) -> None:
        self.counts.add("corrupt")
        message = "Deleted the damaged entry %s from tier %s; it is computed again when needed: %s"
        log.warning(message, what, self.name, why)


def _key(name: str) -> ChunkKey | None:
    try:
        return ChunkKey.parse(name)
    except ValueError:
        return None
