"""A tier on a Redis or Valkey server, shared by all machines that open it. `redis_index.py` has the commands.

Each layer is a field of the entry's hash, so one layer is one read. A write reserves room before it uploads a byte, and
the upload becomes an entry in one step, so `nbytes` (heads and layers; the server needs a little more) never exceeds
`capacity`, even if a process is killed. A server that is down costs one timeout (`breaker.py`).
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, Self, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from ragfuse.codec import checksum
from ragfuse.settings import Settings
from ragfuse.store.breaker import Breaker, BreakerOpen
from ragfuse.store.redis_index import RedisIndex, entry_of, error_text
from ragfuse.store.sizes import format_sizes
from ragfuse.store.tier import Counts, EntryMeta, Evictor, Freed, parsed, victims_for
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")

_Answer = TypeVar("_Answer")
_Row = tuple[bytes, bytes]
_MAX_LAYER_NBYTES = 512 << 20
_MAX_HEAD_NBYTES = 4 << 20
_TRIES = 20
_PIPELINE_ERROR = " of pipeline caused error: "
"""The text that redis-py puts between a command, which may contain a chunk's bytes, and the server's answer."""


class _Upload(NamedTuple):
    """An entry to be written.

    Args:
        name: Name of the upload, unique to this write; it begins with the size in bytes.
        nbytes: Bytes of head and layers.
        key: Key of the entry.
        meta: Its description.
        head: The description as it is stored.
        layers: The bytes of each layer.
    """

    name: str
    nbytes: int
    key: ChunkKey
    meta: EntryMeta
    head: bytes
    layers: list[memoryview]


class RedisTier:
    """A tier on a Redis or Valkey server.

    A server that is down is no error: it is left out for a while, and every lookup is a miss meanwhile. Uses are
    ordered by the server's clock and reported by this machine's.

    Args:
        url: A URL as redis-py takes it: redis://, rediss:// (TLS) or unix://, with user and password.
        capacity: Most bytes that its entries may occupy.
        evict: The eviction policy.
        timeout_s: Seconds of silence after which the server counts as down. A large layer over a slow link may take
            longer, as long as data arrives.
        ttl_s: Seconds without a use after which an unpinned entry expires; None: never.
        name: Name of the tier.
        verify: Whether to check the checksum of every layer that is read.
        lease_s: Seconds after its last upload until the room reserved by a killed writer is free again.
        cool_down_s: Seconds without a request after the server was down.
        clock: Returns the time in seconds since the epoch.

    Raises:
        StoreError: The URL cannot be used.
    """

    slow = True

    def __init__(
        self,
        url: str,
        capacity: int,
        evict: Evictor,
        *,
        timeout_s: float = 2.0,
        ttl_s: float | None = None,
        name: str = "redis",
        verify: bool = True,
        lease_s: float = 60.0,
        cool_down_s: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.capacity, self.counts = name, capacity, Counts()
        self._evict, self._verify, self._lease_s = evict, verify, lease_s
        self._index = RedisIndex(url, timeout_s, ttl_s, clock)
        label = f"Tier {name} ({self._index.address})"
        self.breaker = Breaker(label, self._index.down_errors, cool_down_s=cool_down_s, error_text=error_text)
        self._index.guard = self.breaker.guard
        self._described = lru_cache(64)(_described)
        self._closed, self._complaint = False, ""
        self._n_layers: dict[str, int] = {}  # by model, for those of which an entry was seen
        self._ask("be opened", lambda: self._index.run("weigh"), None)

    @classmethod
    def open(cls, url: str, settings: Settings, evict: Evictor, name: str) -> Self:
        """Open the tier at a URL, with capacity, timeout and time to live from the settings."""
        return cls(
            url,
            settings.tier_bytes,
            evict,
            timeout_s=settings.tier_timeout_s,
            ttl_s=settings.ttl_s,
            name=name,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, including those being written; 0 while the server is down."""
        return self._ask("be measured", lambda: int(self._index.run("weigh")), 0)

    @property
    def n_entries(self) -> int:
        """Entries stored now; 0 while the server is down."""
        return self._ask("be counted", self._index.count, 0)

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys, or all entries, least recently used first."""
        names = None if keys is None else dict.fromkeys(map(str, keys))
        if names == {}:
            return {}
        rows = self._ask("look up entries", lambda: list(self._index.rows(names)), list[_Row]())
        found = sorted(self._parsed(rows), key=lambda entry: entry.last_used)
        return {entry.key: entry for entry in found}

    def read(self, key: ChunkKey, first: int, count: int = 1) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """Return an entry's description and `count` pieces (`Tier.read`), in one round trip.

        A damaged entry is dropped and counted.
        """
        if first < 0 or count < 1:
            return None
        name, hit = str(key), first % self._n_layers.get(key.model, first + 1) == 0
        fields = self._ask(f"read {key}", lambda: self._index.fields(name, first, count, hit=hit), None)
        if fields is None:
            return None
        head, *values = fields
        try:
            meta = self._described(key, head)
            self._n_layers[key.model] = meta.n_layers
            if first + count > len(meta.layers):
                return None
            return meta, *(self._layer(meta, layer, value) for layer, value in enumerate(values, first))
        except ValueError as error:
            self._drop(name, head or b"", str(error))
            return None

    def write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store an entry (`Tier.write`) as one hash, which appears whole or not at all."""
        meta.check(blobs)
        if ChunkKey.parse(str(key)) != key:
            raise ValueError(f"{key!r} cannot be stored: written as text and read back, it is another key.")
        largest = max(layer.nbytes for layer in meta.layers)
        if largest > _MAX_LAYER_NBYTES:
            self.counts.add("refused")
            what = (key, self.name, largest, _MAX_LAYER_NBYTES)
            log.warning("Did not write %s to tier %s: a layer has %d bytes, Redis takes at most %d", *what)
            return False
        return not self._closed and self._write(_upload(key, meta, blobs))

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries and return how many there were."""
        names = [str(key) for key in keys]
        done = self._ask("delete entries", lambda: self._index.delete(names), None, changes=True) if names else 0
        if done is None and not self._closed:
            log.warning(
                "Did not delete %d entries of tier %s: its server is unreachable or refused", len(names), self.name
            )
        return done or 0

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction and expiry, or stop protecting them, for all who share the server."""
        names = [str(key) for key in keys]
        if names:
            self._ask("pin entries", lambda: self._index.pin(names, pinned), None, changes=True)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit, and restart their time to live.

        Takes one round trip for some hundreds of entries.
        """
        names = list(dict.fromkeys(map(str, keys)))
        if names:
            self._ask("record uses", lambda: self._index.touch(names), None)

    def tidy(self) -> Freed:
        """Scan all keys of the database, delete what no entry needs, and drop entries whose bytes are gone."""
        for name in self._ask("find entries without bytes", self._index.without_bytes, list[str]()):
            self._drop(name, b"", "its bytes are gone")
        return self._ask("be tidied", self._index.sweep, Freed())

    def close(self) -> None:
        """Close the connections. Closing twice does nothing."""
        self._closed = True
        self._index.close()

    # asking

    def _ask(self, doing: str, call: Callable[[], _Answer], otherwise: _Answer, *, changes: bool = False) -> _Answer:
        """Return what `call` returns, or `otherwise` if the server fails (counted) or the breaker is open.

        While the breaker is open, only a call that `changes` something counts as failed; a lookup or read is a miss.
        `doing` says in the log what could not be done.
        """
        if self._closed:
            return otherwise
        try:
            self.breaker.check()
            return call()
        except BreakerOpen:
            self.counts.add("failed", int(changes))
        except self._index.down_errors:  # the breaker has logged it
            self.counts.add("failed")
        except self._index.errors as error:
            self.counts.add("failed")
            if _complaint(error) != self._complaint:  # a server whose memory is full refuses every chunk
                self._complaint = _complaint(error)
                log.warning("%s could not %s: %s", self.breaker.name, doing, self._complaint)
        return otherwise

    def _drop(self, name: str, head: bytes, why: str) -> None:
        """Drop an entry that cannot be read, unless it was deleted or rewritten meanwhile."""
        if self._ask(f"drop {name}", lambda: self._index.run("drop_unreadable", name, head), 0):
            self.counts.add("corrupt")
            log.warning(
                "Deleted the damaged entry %s from tier %s; it is computed again when needed: %s", name, self.name, why
            )

    # reading

    def _parsed(self, rows: Iterable[_Row]) -> Iterator[Entry]:
        """Yield the entries that rows describe; drop rows that are damaged."""
        for name, row in rows:
            try:
                entry = entry_of(name, row, self.name, self._index.ahead_s, self._index.now_s)
                self._n_layers[entry.key.model] = entry.n_layers
                yield entry
            except ValueError:
                if self._ask("drop an entry", partial(self._index.run, "drop_damaged_row", name), 0):
                    self.counts.add("corrupt")
                    log.warning(
                        "Deleted the damaged entry %r from tier %s; it is computed again when needed: row %r",
                        name,
                        self.name,
                        row,
                    )

    def _layer(self, meta: EntryMeta, layer: int, value: bytes | None) -> Tensor:
        """Return a piece as uint8 `[nbytes]`; raise ValueError if it is missing or damaged."""
        described = meta.layers[layer]
        if value is None or len(value) != described.nbytes:
            found = "none" if value is None else f"{len(value)}"
            raise ValueError(f"layer {layer} should have {described.nbytes} bytes, found {found}")
        blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if self._verify and checksum(blob) != described.checksum:
            raise ValueError(f"checksum of layer {layer} does not match")
        return blob

    # writing

    def _write(self, upload: _Upload) -> bool:
        fits, doing = upload.nbytes <= self.capacity, f"write {upload.key}"
        room = self._ask(doing, lambda: self._reserve(upload), None, changes=True) if fits else False
        if not room:
            self.counts.add("refused", int(room is False))
            return False
        is_published = self._ask(doing, lambda: self._send(upload), None, changes=True)
        if is_published is None:
            self._ask("release reserved space", lambda: self._index.run("abandon", upload.name), 0)
        return bool(is_published)

    def _send(self, upload: _Upload) -> bool:
        """Upload the bytes and publish them as an entry; return False if the reserved room was lost meanwhile."""
        self._index.upload(upload.name, self._lease_s, upload.head, upload.layers)
        meta = upload.meta
        description = f"{meta.n_tokens} {meta.n_layers} {format_sizes(meta.sizes)}"
        if self._index.publish(upload.name, str(upload.key), description, len(upload.layers)):
            self._complaint = ""
            return True
        self.counts.add("failed")
        what = (upload.key, self.name, self._lease_s)
        log.warning(
            "Did not write %s to tier %s: it took too long, as space is reserved for only %g s after each part", *what
        )
        return False

    def _reserve(self, upload: _Upload) -> bool:
        """Reserve room for an upload, evicting if needed; return False if not enough can be freed."""
        doomed: list[_Row] = []
        for _ in range(_TRIES):
            done, n = self._index.reserve(upload.name, self.capacity, self._lease_s, doomed)
            if done:
                self.counts.add("evicted", n)
                return True
            seen: dict[ChunkKey, _Row] = {}
            dropped = self.counts["corrupt"]
            keys = victims_for(self._evict, partial(self._oldest, seen), n, upload.key)
            if keys is None and self.counts["corrupt"] > dropped:
                continue  # damaged rows were dropped, which has freed some room
            if keys is None:
                return False
            doomed = [seen[key] for key in keys]  # with rows: one that was used meanwhile is spared
        return False

    def _oldest(self, seen: dict[ChunkKey, _Row]) -> Iterator[Entry]:
        for name, row in self._index.oldest():
            for entry in self._parsed([(name, row)]):
                seen[entry.key] = name, row
                yield entry


def _complaint(error: Exception) -> str:
    """Return the server's answer without the command, which may contain a chunk's bytes and so differs each time."""
    return error_text(error).rpartition(_PIPELINE_ERROR)[2]


def _upload(key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> _Upload:
    here = [blob.cpu().contiguous() for blob in blobs]
    meta = meta.sealed(here)
    head = _pack(key, meta)
    nbytes = len(head) + meta.nbytes
    return _Upload(f"{nbytes}:{uuid.uuid4().hex}", nbytes, key, meta, head, [blob.numpy().data for blob in here])


def _pack(key: ChunkKey, meta: EntryMeta) -> bytes:
    """Return the field that describes an entry: 32 bytes of BLAKE3 of the rest, then JSON {key, write, meta}.

    `write` is a random id, so no two writes of an entry have the same field.
    """
    text = json.dumps({"key": str(key), "write": uuid.uuid4().hex, "meta": meta.to_json()}).encode()
    return blake3(text).digest() + text


def _described(key: ChunkKey, head: bytes | None) -> EntryMeta:
    """Parse what `_pack` wrote for `key`; raise ValueError if it is missing, damaged or another entry's."""
    if head is None:
        raise ValueError("its bytes are gone")
    if len(head) > _MAX_HEAD_NBYTES:
        raise ValueError(f"its description has {len(head)} bytes, more than the limit of {_MAX_HEAD_NBYTES}")
    if blake3(head[32:]).digest() != head[:32]:
        raise ValueError("checksum of its description does not match")
    try:
        data = parsed(head[32:])
        if data["key"] != str(key):
            raise ValueError(f"it holds {data['key']}")
        return EntryMeta.from_json(data["meta"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its description cannot be read: {error!r}") from error
