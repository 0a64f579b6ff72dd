"""A tier in an object store behind an fsspec URL: s3://, gs://, abfs://, or a shared file:// folder.

Each entry is one object in the format of `chunkfile.py`. `bucket.py` has the requests, `object_state.py` the local
cache of what the store holds, `object_pages.py` the listings that update it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import islice
from typing import Self, TypeVar

import torch
from torch import Tensor

from ragfuse.process.lru import LRU
from ragfuse.settings import Settings, SharedWith
from ragfuse.store.breaker import Breaker, BreakerOpen
from ragfuse.store.bucket import NO_ANSWER, Bucket
from ragfuse.store.chunkfile import Header, NotAnEntryError, header_nbytes, layer_offsets, pack_header, pieces
from ragfuse.store.names import (
    CHUNKS_FOLDER,
    PINS_FOLDER,
    chunk_name,
    has_name,
    is_cut_off,
    pin_key,
    pin_name,
    use_name,
)
from ragfuse.store.notes import Notes
from ragfuse.store.object_pages import BucketPages
from ragfuse.store.object_state import HeaderFacts, ObjectIndex, ObjectState
from ragfuse.store.tier import Counts, EntryMeta, Evictor, Freed, victims_for
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")

_Found = TypeVar("_Found")
_HEAD_NBYTES = 1 << 14  # the header of some 70 layers
_HEADERS = 1024
_CHANGES = ("write", "delete", "pin")
_BATCH = 256
_TRIES = 3
_NOTES_IN_TTL = 8


class ObjectTier:
    """A tier in a folder of an object store, shared by all processes that open the same URL.

    Objects: one per entry, named by its key; it appears whole or not at all. Reading `count` layers is one range
    request. Headers are cached, so a chunk costs one request to be found and one per read.

    Listings: what the store holds is cached here. A cached entry is returned without a request, so if another process
    has deleted it, reading it is a miss. Entries that are not cached are requested together. The cache is updated by a
    listing before the first write, whenever all entries are asked for, and at a write if the last listing is older than
    `fresh_s` (or, if that is longer, than twice `fresh_s` per second that a listing takes). Only the first write waits
    for a listing; lookups and reads never do.

    Capacity: kept to the byte within a process, as far as it knows the objects of others. As an object store has no
    shared counters, several processes may together exceed it by what they write within `fresh_s`; the next write after
    a listing makes room again. Uses and hits are those of this process; before its first use, an entry counts as used
    when it was written. Pins are objects and outlive the process; those of others count once they are listed.

    Expiry: with `ttl_s`, unpinned entries unused for that long are misses, and `tidy` deletes them. Uses are then
    recorded in the store in the background, by an empty object per entry that is rewritten at most eight times per
    `ttl_s`, and `last_used` is that of all processes as of the last listing. A process that has not listed for long may
    miss an entry that others use, but it checks before it deletes one. All processes that share a store should set the
    same `ttl_s`, as one without it records no uses.

    Credentials and endpoints are those of the fsspec drivers (environment, profiles). A store that does not answer is
    no error: it is left out for `cool_down_s`.

    Args:
        url: The folder as an fsspec URL.
        capacity: Most bytes that its objects may occupy.
        evict: The eviction policy.
        timeout_s: Seconds that a request may take; one second more per megabyte of data.
        name: Name of the tier.
        verify: Whether to check the checksum of every layer that is read.
        clock: Returns the time in seconds since the epoch.
        ttl_s: Seconds without a use after which an entry expires; None: never.
        fresh_s: Seconds for which a listing counts as up to date.
        cool_down_s: Seconds without a request after the store did not answer.
        shared_with: Who else may use the folder of a file:// URL.

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
        name: str = "objects",
        verify: bool = True,
        clock: Callable[[], float] = time.time,
        ttl_s: float | None = None,
        fresh_s: float = 5.0,
        cool_down_s: float = 10.0,
        shared_with: SharedWith = "nobody",
    ) -> None:
        self.name, self.capacity, self.counts = name, capacity, Counts()
        self._evict, self._verify, self._clock, self._ttl_s = evict, verify, clock, ttl_s
        self._bucket = Bucket(url, timeout_s, shared_with)
        self._index, self._headers = ObjectIndex(), LRU[ChunkKey, Header](_HEADERS)
        self.breaker = Breaker(f"Tier {name} ({self._bucket.url})", NO_ANSWER, cool_down_s=cool_down_s)
        self._bucket.guard = self.breaker.guard
        self._listing = BucketPages(self._bucket, self._index, fresh_s, uses=ttl_s is not None)
        self._notes, self._timeout_s = Notes(self._note), timeout_s
        self._head_nbytes, self._closed = _HEAD_NBYTES, False
        self._room = threading.Lock()  # held while a write reserves room and evicts
        self._logged_errors: set[tuple[object, ...]] = set()
        self._ask("be opened", self._open, None)

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
            shared_with=settings.shared_with,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all known objects, including those being written; 0 until the store answers."""
        if self._listing.is_due:
            self._ask("be measured", self._listing.read, None)
        return 0 if self._closed else self._index.nbytes

    @property
    def n_entries(self) -> int:
        """Entries stored now, as far as this process knows."""
        return 0 if self._closed else len(self._index.keys())

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys (one round trip, if any is not cached), or all entries (a listing)."""
        if keys is None:
            return self._ask("list entries", self._list_all, {})
        wanted = list(dict.fromkeys(keys))
        return self._ask("look up entries", lambda: self._find(wanted), {}) if wanted else {}

    def read(self, key: ChunkKey, first: int, count: int = 1) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """Return an entry's description and `count` pieces (`Tier.read`): one request, once its header is cached."""
        if first < 0 or count < 1:
            return None
        return self._ask(f"read {key}", lambda: self._read(key, first, count), None)

    def write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store an entry (`Tier.write`) as one object, which appears whole or not at all."""
        meta.check(blobs)
        if ChunkKey.parse(str(key)) != key or not has_name(key):
            raise ValueError(f"{key!r} cannot be stored: its text form is read back as another key.")
        return self._ask(f"write {key}", lambda: self._write(key, meta.sealed(blobs), blobs), False)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries and return how many there were."""
        doomed = list(dict.fromkeys(keys))
        return self._ask("delete entries", lambda: self._delete(doomed), 0) if doomed else 0

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction, or stop protecting them; others that share the store see it once they list."""
        wanted = list(dict.fromkeys(keys))
        self._ask("pin entries", lambda: self._pin(wanted, pinned), None)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of known entries to now, without counting a hit and without waiting for the store."""
        for key in () if self._closed else keys:
            if not self._is_old(key):
                self._use(key, hit=False)

    def tidy(self) -> Freed:
        """Delete expired entries, and what interrupted writes left behind an hour ago or more (uploads: a day)."""
        return self._ask("be tidied", self._tidied, None) or Freed()

    def close(self) -> None:
        """Record waiting uses, for `timeout_s` at most, and close the tier; afterwards every lookup is a miss."""
        self._notes.wait(self._timeout_s)
        self._closed = True
        self._headers.clear()

    # asking

    def _ask(self, doing: str, call: Callable[[], _Found], otherwise: _Found) -> _Found:
        """Return what `call` returns, or `otherwise` if the store fails or the breaker is open, which is counted.

        `doing` says in the log what could not be done.
        """
        if self._closed:
            return otherwise
        try:
            self.breaker.check()
            return call()
        except BreakerOpen:
            self.counts.add("failed" if doing.startswith(_CHANGES) else "left out")
        except NO_ANSWER:  # the breaker has logged it
            self.counts.add("failed")
        except OSError as error:
            self.counts.add("failed")
            error_kind = doing.split()[0], type(error), error.errno
            if error_kind not in self._logged_errors:  # a store that forbids writes refuses every chunk
                self._logged_errors.add(error_kind)
                log.warning("%s could not %s: %s", self.breaker.name, doing, error)
        return otherwise

    def _open(self) -> None:
        self._index.pin(filter(None, map(pin_key, self._bucket.check(PINS_FOLDER))), True)

    def _tidied(self) -> Freed:
        freed = self._listing.read(anew=True)
        no_bytes = list[int]()
        aborted = self._ask(
            "look for uploads that were cut off", lambda: self._bucket.abort(CHUNKS_FOLDER, is_cut_off), no_bytes
        )
        freed = freed.plus(Freed(orphans=len(aborted), nbytes=sum(aborted)))
        return freed if self._ttl_s is None else freed.plus(self._expire())

    def _expire(self) -> Freed:
        old = [key for key in self._index.oldest() if self._is_old(key)]
        with self._index.claim(old, wait=False) as claimed:
            nbytes = sum(held.nbytes for held in map(self._index.get, claimed) if held)
            return Freed(expired=self._remove(claimed), nbytes=nbytes)

    def _use(self, key: ChunkKey, *, hit: bool) -> None:
        now = self._clock()
        self._index.use(key, now, hit=hit)
        if self._ttl_s is not None and self._index.should_record(key, now, self._ttl_s / _NOTES_IN_TTL):
            self._notes.add(key)

    def _note(self, keys: Sequence[ChunkKey]) -> None:
        self._ask("record uses", lambda: self._bucket.mark([use_name(key) for key in keys]), None)

    def _is_old(self, key: ChunkKey) -> bool:
        now = self._clock()
        self._index.settle_uses(now)
        held = self._index.get(key)
        if held is None or self._ttl_s is None or now - held.last_used <= self._ttl_s:
            return False
        return not self._index.is_pinned(key)

    # finding

    def _list_all(self) -> dict[ChunkKey, Entry]:
        self._listing.read()
        return {entry.key: entry for entry in self._oldest() if not self._is_old(entry.key)}

    def _find(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys that have not expired."""
        return {entry.key: entry for entry in self._known(keys) if not self._is_old(entry.key)}

    def _known(self, keys: Sequence[ChunkKey]) -> Iterator[Entry]:
        """Return the entries with these keys. Headers that were not read yet are requested together."""
        unknown = [key for key in keys if (held := self._index.get(key)) is None or held.facts is None]
        for lo in range(0, len(unknown), _BATCH):
            self._read_headers(unknown[lo : lo + _BATCH])
        self._index.settle_uses(self._clock())
        found = (self._index.entry(key, self.name) for key in keys)
        return (entry for entry in found if entry is not None)

    def _oldest(self) -> Iterator[Entry]:
        """Yield all entries, least recently used first, reading missing headers only as far as the caller iterates."""
        self._index.settle_uses(self._clock())
        keys = iter(self._index.oldest())
        while batch := list(islice(keys, _BATCH)):
            yield from self._known(batch)

    def _read_headers(self, keys: Sequence[ChunkKey]) -> None:
        with self._index.watch() as changed:
            for key, data in zip(keys, self._bucket.heads(list(map(chunk_name, keys)), self._head_nbytes), strict=True):
                if data is None:
                    self._index.forget([key], unless=changed)
                    continue
                try:
                    header = self._header(key, data)
                    held = self._index.get(key)
                    if held is not None and held.nbytes != header.nbytes and key not in changed:
                        raise ValueError(f"it should have {header.nbytes} bytes, but has {held.nbytes}")
                except NotAnEntryError:
                    self._ignore(key)
                except ValueError as error:
                    self._drop(key, str(error), changed)
                else:
                    self._remember(key, header, changed)

    def _header(self, key: ChunkKey, data: bytes) -> Header:
        """Parse the header of an object that begins with `data`, reading more if needed; ValueError if invalid."""
        missing = header_nbytes(data) - len(data)
        if missing > 0:
            data += self._bucket.read(chunk_name(key), len(data), len(data) + missing)
        header = Header.parse(data)
        if header.key != key:
            raise ValueError(f"it holds {header.key}")
        self._head_nbytes = max(self._head_nbytes, header.offsets[0])
        return header

    def _remember(self, key: ChunkKey, header: Header, changed: Set[ChunkKey]) -> None:
        self._index.describe(key, header.nbytes, _facts(header.meta), self._clock(), changed)
        if key not in changed:
            self._headers.add(key, header)

    # reading

    def _read(self, key: ChunkKey, first: int, count: int) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """Read pieces. If they do not fit the cached header, the entry may have been rewritten: read it again too."""
        if self._is_old(key):
            return None
        with self._index.watch() as changed:
            known, why = self._headers.get(key), ""
            for _ in range(_TRIES):
                try:
                    header, layers = self._fetch(key, known, first, count)
                except FileNotFoundError:
                    self._forget(key, changed)
                    return None
                except NotAnEntryError:
                    self._ignore(key)
                    return None
                except ValueError as error:
                    known, why = None, str(error)
                    continue
                if known is None:
                    self._remember(key, header, changed)
                self._use(key, hit=header.meta.begins(first))
                return (header.meta, *layers) if layers else None
            self._drop(key, why, changed)
        return None

    def _fetch(self, key: ChunkKey, header: Header | None, first: int, count: int) -> tuple[Header, list[Tensor]]:
        """Return the header and `count` pieces, or no pieces if the entry has fewer.

        An unknown header and the first layers take one request together.
        """
        data = b""
        if header is None:
            data = self._bucket.read(
                chunk_name(key), 0, self._head_nbytes + (self._guess(key, count) if first == 0 else 0)
            )
            header = self._header(key, data)
        if first + count > len(header.meta.layers):
            return header, []
        begin, end = header.span(first, count)
        part = data[begin:end]
        if len(part) < end - begin:
            part += self._bucket.read(chunk_name(key), begin + len(part), end)
        if len(part) < end - begin:
            raise ValueError("the object ends too early")
        span = torch.empty(len(part), dtype=torch.uint8)
        span.numpy().data[:] = part
        return header, header.cut(span, first, count, verify=self._verify)

    def _guess(self, key: ChunkKey, count: int) -> int:
        """Estimate the bytes of the first `count` pieces; 0 if nothing is known about the entry."""
        held = self._index.get(key)
        return held.facts.begin_nbytes(count) if held and held.facts else 0

    def _forget(self, key: ChunkKey, changed: Set[ChunkKey]) -> None:
        """Forget an entry that another process has deleted. This is not counted as damage."""
        self._index.forget([key], unless=changed)
        self._headers.discard([key])

    def _ignore(self, key: ChunkKey) -> None:
        """Ignore an object that has the name of an entry but was not written by ragfuse; it is not deleted."""
        self._index.ignore(key)
        self._headers.discard([key])
        self.counts.add("corrupt")
        log.warning("Ignored the object named like entry %s in tier %s: it was not written by ragfuse", key, self.name)

    def _drop(self, key: ChunkKey, why: str, changed: Set[ChunkKey]) -> None:
        """Delete an entry that cannot be read, unless it was deleted or rewritten meanwhile."""
        with self._index.claim([key], unless=changed) as claimed:
            if claimed:
                self._ask(f"delete {key}", lambda: self._remove(claimed), 0)  # if it fails, the key is forgotten too
                self._forget(key, frozenset())
                self.counts.add("corrupt")
                log.warning(
                    "Deleted the damaged entry %s from tier %s; it is computed again when needed: %s",
                    key,
                    self.name,
                    why,
                )

    # writing

    def _write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        head = pack_header(key, meta)
        offsets = layer_offsets(len(head), meta)
        with self._index.claim([key]):
            if not self._reserve(key, offsets[-1]):
                self.counts.add("refused")
                return False
            try:
                self._bucket.write(chunk_name(key), b"".join(pieces(head, blobs)))
            except BaseException:
                self._index.release(offsets[-1])
                self._listing.forget()  # the object may exist all the same, so list before the next write
                raise
            now = self._clock()
            self._index.put(key, ObjectState(offsets[-1], now, facts=_facts(meta), recorded_use=now))
            self._headers.add(key, Header(key, meta, offsets))
        self._logged_errors.clear()
        return True

    def _reserve(self, key: ChunkKey, nbytes: int) -> bool:
        """Reserve room for a write, evicting if needed; return False if not enough can be freed."""
        with self._room:
            self._listing.read(wait=False)
            for _ in range(_TRIES if nbytes <= self.capacity else 0):
                excess = self._index.reserve(nbytes, self.capacity)
                if not excess:
                    return True
                doomed = victims_for(self._evict, lambda: self._evictable(key), excess, key)
                if doomed is None:
                    return False
                with self._index.claim(set(doomed) - {key}, wait=False) as claimed:
                    self.counts.add("evicted", self._remove(claimed | ({key} & set(doomed))))
        return False

    def _evictable(self, key: ChunkKey) -> Iterator[Entry]:
        """Yield the entries, oldest first, that no other thread is changing; the caller has claimed `key`."""
        return (entry for entry in self._oldest() if entry.key == key or not self._index.is_busy(entry.key))

    def _delete(self, keys: Sequence[ChunkKey]) -> int:
        self._find(keys)
        with self._index.claim(keys) as claimed:
            stored = [key for key in claimed if self._index.get(key)]
            names = (pin_name, use_name) if self._ttl_s is not None else (pin_name,)
            self._bucket.delete([name(key) for key in stored for name in names])
            return self._remove(stored)

    def _remove(self, keys: Iterable[ChunkKey]) -> int:
        """Delete the objects of claimed keys and return how many were known."""
        doomed = list(keys)
        self._bucket.delete([chunk_name(key) for key in doomed])
        self._headers.discard(doomed)
        return self._index.forget(doomed)

    def _pin(self, keys: Sequence[ChunkKey], pinned: bool) -> None:
        known = self._find(keys) if pinned else dict.fromkeys(keys)
        with self._index.claim(known) as claimed:
            stored = [key for key in claimed if self._index.get(key)] if pinned else list(claimed)
            for key in stored if pinned else ():
                self._bucket.write(pin_name(key), b"")
            if not pinned:
                self._bucket.delete([pin_name(key) for key in stored])
            self._index.pin(stored, pinned)


def _facts(meta: EntryMeta) -> HeaderFacts:
    return HeaderFacts(meta.sizes, meta.n_tokens, meta.n_layers)
