"""A tier that stores each entry as a file in one folder, which threads and processes may share.

`chunkfile.py` has the file format, `index.py` the table of entries, `upkeep.py` the repair of both after a crash.
A write reserves room in the index before it writes a byte, and eviction removes the file before the row, so the files
never exceed `capacity`, even if a process is killed. An entry gets its row only once its file is complete.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Self

from torch import Tensor

from ragfuse.process.lru import LRU
from ragfuse.settings import Settings, SharedWith
from ragfuse.store.access import make_folder
from ragfuse.store.chunkfile import ChunkFile, layer_offsets, pack_header, write_chunk
from ragfuse.store.folder import FolderWriter, describe_error, fsync_folder, is_full, locked, open_folder, refusal
from ragfuse.store.index import Index
from ragfuse.store.plainfile import remove
from ragfuse.store.tier import Counts, EntryMeta, Evictor, Freed, victims_for
from ragfuse.store.upkeep import Upkeep, chunk_path, folder_in_place
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")

_TOUCHES = 256
_TOUCH_INTERVAL_S = 5.0
_CLOSE_S = 1.0
WARN_AGAIN_S = 60.0
"""Seconds before the same kind of error is logged as a warning again."""


class DiskTier:
    """A tier in a folder. Opening evicts nothing: if more than `capacity` is stored, the next write makes room.

    Args:
        path: The folder; it is created if it is missing.
        capacity: Most bytes that its files may occupy.
        evict: The eviction policy.
        verify: Whether to check the checksum of every layer that is read.
        open_files: How many files stay open between reads.
        name: Name of the tier.
        clock: Returns the time in seconds since the epoch.
        shared_with: Who else may use the folder.

    Raises:
        StoreError: The folder cannot be used.
    """

    slow = True

    def __init__(
        self,
        path: str | Path,
        capacity: int,
        evict: Evictor,
        *,
        verify: bool = True,
        open_files: int = 64,
        name: str = "disk",
        clock: Callable[[], float] = time.time,
        shared_with: SharedWith = "nobody",
    ) -> None:
        self.name, self.capacity, self.counts = name, capacity, Counts()
        self.path = open_folder(Path(path).expanduser(), shared_with)
        self._evict, self._verify, self._clock = evict, verify, clock
        self._files = LRU[ChunkKey, ChunkFile](open_files)  # a file that leaves is closed after its last reader
        self._touched: dict[ChunkKey, tuple[float, int]] = {}
        self._touched_at, self._touch_lock = clock(), threading.Lock()
        self._serial, self._closed = count(), False
        self._warned_at: dict[object, float] = {}  # kind of error -> when it was last logged as a warning
        self._under_way: set[str] = set()  # temp files of this object's writes
        self._freed_at_opening = Freed()
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise refusal(self.path, describe_error(self.path, error)) from error

    @classmethod
    def open(cls, url: str, settings: Settings, evict: Evictor, name: str) -> Self:
        """Open the tier in the folder `url`, with capacity and sharing from the settings."""
        return cls(url, settings.tier_bytes, evict, name=name, shared_with=settings.shared_with)

    @property
    def nbytes(self) -> int:
        """Bytes of all files, including those being written."""
        if self._closed:
            return 0
        try:
            return self._index.nbytes()
        except sqlite3.Error as error:
            self._failed("weigh", self.path, error)
            return 0

    @property
    def n_entries(self) -> int:
        """Entries stored now; 0 while the index cannot be read."""
        try:
            return 0 if self._closed else len(self._index)
        except sqlite3.Error as error:
            self._failed("count entries in", self.path, error)
            return 0

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys, or all, as the index lists them; the file of one may be missing."""
        if self._closed:
            return {}
        try:
            found = self._index.entries(keys)
        except (sqlite3.Error, ValueError) as error:
            self._failed("look up entries in", self.path, error)
            return {}
        now = self._clock()
        with self._touch_lock:
            for key in found.keys() & self._touched.keys():
                when, hits = self._touched[key]
                entry = found[key]
                found[key] = replace(entry, last_used=max(entry.last_used, min(when, now)), hits=entry.hits + hits)
        return found

    def read(self, key: ChunkKey, first: int, count: int = 1) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """Return an entry's description and `count` pieces (`Tier.read`). A damaged entry is dropped and counted."""
        if self._closed:
            return None
        try:
            file = self._open_file(key, first)
            if not 0 <= first < first + count <= len(file.meta.layers):
                return None
            blobs = file.read(first, count, verify=self._verify)
        except FileNotFoundError:
            self._drop(key, "its file is gone", is_missing=True)
            return None
        except ValueError as error:
            self._drop(key, str(error))
            return None
        except OSError as error:  # the medium, not the entry: too many open files, an I/O error
            self._failed("read", key, error)
            return None
        self._touch(key, hit=file.meta.begins(first))
        return file.meta, *blobs

    def expect(self, keys: Iterable[ChunkKey], first: int, count: int) -> None:
        """Ask the operating system to prefetch `count` pieces; errors are left to the read that follows."""
        for key in () if self._closed else keys:
            with suppress(OSError, ValueError):
                self._open_file(key, first).expect(first, count)

    def write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store an entry (`Tier.write`) as one file, which appears whole or not at all."""
        meta.check(blobs)
        if ChunkKey.parse(str(key)) != key:
            raise ValueError(f"{key!r} cannot be stored: written as text and read back, it is another key.")
        if self._closed:
            return False
        try:
            return self._write(key, meta.sealed(blobs), blobs)
        except (OSError, sqlite3.Error) as error:
            self._failed("write", key, error)
            return False

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries and return how many there were."""
        doomed = list(keys)
        try:
            with self._index.write() as transaction:
                return self._remove(transaction, doomed)
        except (OSError, sqlite3.Error) as error:
            self._failed("delete entries in", self.path, error)
            return 0

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction, or stop protecting them. Pins outlive the process."""
        try:
            with self._index.write() as transaction:
                self._index.pin(transaction, keys, pinned)
        except sqlite3.Error as error:
            self._failed("pin entries in", self.path, error)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit.

        Other processes see it at once or, if the index is busy, after the next write or read of this one.
        """
        if self._closed:
            return
        now = self._clock()
        with self._touch_lock:
            for key in keys:
                self._touched[key] = (now, self._touched.get(key, (now, 0))[1])
        self._flush_touches(wait_s=0.0)

    def tidy(self) -> Freed:
        """Remove what interrupted writes left behind, and check every file against the index.

        Returns:
            What was freed, at the first call with what opening the tier has freed already.
        """
        if self._closed:
            return Freed()
        try:
            with self._index.write() as transaction:
                freed = self._upkeep.clean_up_dead_writes(transaction)
            freed = freed.plus(self._upkeep.reconcile())
            with locked(self.path / "lock"):
                self._owner.sweep()
        except (OSError, sqlite3.Error) as error:
            self._failed("tidy", self.path, error)
            return Freed()
        freed, self._freed_at_opening = freed.plus(self._freed_at_opening), Freed()
        return freed

    def close(self) -> None:
        """Write the latest uses to the index and close all files. Closing twice does nothing."""
        if self._closed:
            return
        self._flush_touches(wait_s=_CLOSE_S)
        self._closed = True
        self._files.clear()
        self._index.close()
        self._owner.close()

    # opening

    def _open(self) -> None:
        chunks, writers = self.path / "chunks", self.path / "writers"
        make_folder(chunks)
        make_folder(writers)
        with locked(self.path / "lock"):
            self._index = Index(self.path / "index.sqlite", self.name, self._clock)
            self._owner = FolderWriter(writers)
            self._upkeep = Upkeep(self.path, self._index, self._owner, self._under_way, self._count_corrupt)
            with self._index.write() as transaction:
                self._freed_at_opening = self._upkeep.clean_up_dead_writes(transaction)
            lacks_room = self._index.lacks_room or (self._upkeep.is_due() and not self._reconciled())
            self._owner.sweep()
        if lacks_room:
            log.warning(
                "The disk of %s is full: what is stored is read, but nothing is added until there is room. Free space "
                "on it, or delete entries: ragfuse store clear.",
                self.path,
            )

    def _reconciled(self) -> bool:
        """Check every file against the index; return False where the disk has no room for that."""
        try:
            self._freed_at_opening = self._freed_at_opening.plus(self._upkeep.reconcile())
        except (OSError, sqlite3.Error) as error:
            if is_full(self.path, error):
                return False
            raise
        return True

    # reading

    def _path(self, key: ChunkKey) -> Path:
        return chunk_path(self.path, key)

    def _open_file(self, key: ChunkKey, first: int) -> ChunkFile:
        """Return the open file of an entry.

        A reader that has read earlier layers may finish on a file that was deleted since; a new reader opens it again.
        """
        file = self._files.get(key)
        if file is not None and not (file.meta.begins(first) and file.is_unlinked):
            return file
        file = ChunkFile(self._path(key))
        if file.key != key:
            raise ValueError(f"it holds {file.key}")
        self._files.add(key, file)
        if file.is_unlinked:  # deleted between opening and adding
            self._files.discard([key])
        return file

    def _drop(self, key: ChunkKey, why: str, *, is_missing: bool = False) -> None:
        """Drop an entry that cannot be read, unless another process deleted or rewrote it meanwhile."""
        self._files.discard([key])
        if not self.entries([key]):
            return
        try:
            with self._index.write() as transaction:
                if not (is_missing and self._path(key).exists()) and self._remove(transaction, [key]):
                    self._count_corrupt(key, folder_in_place(self._path(key)) or why)
        except (OSError, sqlite3.Error) as error:
            self._failed("drop", key, error)

    def _touch(self, key: ChunkKey, *, hit: bool) -> None:
        """Note a use in memory; the index is updated only now and then."""
        now = self._clock()
        with self._touch_lock:
            self._touched[key] = (now, self._touched.get(key, (now, 0))[1] + hit)
            is_due = len(self._touched) >= _TOUCHES or not 0 <= now - self._touched_at < _TOUCH_INTERVAL_S
            if is_due:
                self._touched_at = now
        if is_due:
            self._flush_touches(wait_s=0.0)

    def _flush_touches(self, *, wait_s: float) -> None:
        with suppress(sqlite3.Error), self._index.write(wait_s=wait_s) as transaction:
            self._write_touches(transaction)

    def _write_touches(self, transaction: sqlite3.Connection) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._index.touch(transaction, touched)

    # writing

    def _write(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        path, header = self._path(key), pack_header(key, meta)
        nbytes = layer_offsets(len(header), meta)[-1]
        temp = path.with_name(f"{path.stem}.{self._owner.token}.{next(self._serial)}.tmp")
        name = str(temp.relative_to(self.path))
        self._under_way.add(name)
        try:
            if not self._reserve(name, key, nbytes):
                self.counts.add("refused")
                return False
            make_folder(path.parent)
            write_chunk(temp, header, blobs)
            with self._index.write() as transaction:
                _put_in_place(temp, path)
                self._index.end(transaction, name)
                self._index.publish(transaction, key, meta, nbytes, self._clock())
        except BaseException:
            self._abandon(temp, name, key)
            raise
        finally:
            self._under_way.discard(name)
        self._files.discard_where(attrgetter("is_unlinked"))
        fsync_folder(path.parent)
        return True

    def _abandon(self, temp: Path, name: str, key: ChunkKey) -> None:
        """Remove all traces of a failed write, even if its file was renamed and only its row could not be written."""
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        with suppress(OSError, sqlite3.Error), self._index.write() as transaction:
            indexed_nbytes = sum(entry.nbytes for entry in self._index.entries_in(transaction, [key]))
            if self._path(key).exists() and self._path(key).stat().st_size != indexed_nbytes:
                self._remove(transaction, [key])
            self._index.end(transaction, name)

    def _reserve(self, name: str, key: ChunkKey, nbytes: int) -> bool:
        """Reserve room for a write, evicting if needed; return False if not enough can be freed."""
        with self._index.write() as transaction:
            self._write_touches(transaction)
            self._upkeep.clean_up_dead_writes(transaction)
            if not self._make_room(transaction, key, nbytes):
                return False
            self._index.begin(transaction, name, key, self._owner.token, nbytes)
        return True

    def _make_room(self, transaction: sqlite3.Connection, key: ChunkKey, nbytes: int) -> bool:
        """Evict entries until `nbytes` more fit; return False, and evict nothing, if they cannot fit."""
        excess = self._index.nbytes_in(transaction) + nbytes - self.capacity
        if excess <= 0:
            return True
        if nbytes > self.capacity:
            return False
        doomed = victims_for(self._evict, lambda: self._index.oldest(transaction), excess, key)
        if doomed is None:
            return False
        self.counts.add("evicted", self._remove(transaction, doomed))
        return True

    def _remove(self, transaction: sqlite3.Connection, keys: Sequence[ChunkKey]) -> int:
        """Delete files, then rows: if killed in between, a row without a file is left, and that reads as a miss."""
        for key in keys:
            remove(self._path(key))
        self._files.discard(keys)
        with self._touch_lock:
            for key in keys:
                self._touched.pop(key, None)
        return self._index.remove(transaction, keys)

    def _count_corrupt(self, what: object, why: str) -> None:
        self.counts.add("corrupt")
        log.warning(
            "Deleted the damaged entry %s from tier %s; it is computed again when needed: %s", what, self.name, why
        )

    def _failed(self, doing: str, what: object, error: Exception) -> None:
        self.counts.add("failed")
        log.debug("Could not %s %s (tier %s): %s", doing, what, self.name, error)
        kind, now = (doing, type(error), getattr(error, "errno", None)), time.monotonic()
        with self._touch_lock:
            is_new = now - self._warned_at.get(kind, -WARN_AGAIN_S) >= WARN_AGAIN_S
            self._warned_at[kind] = now if is_new else self._warned_at[kind]
        if is_new:
            details = doing, "chunks" if isinstance(what, ChunkKey) else what, self.name, _reason(error), WARN_AGAIN_S
            log.warning("Could not %s %s (tier %s): %s; the next such error is logged after %g s", *details)


def _put_in_place(temp: Path, path: Path) -> None:
    """Rename a whole file to its entry's path; OSError says what to do about a folder that stands there."""
    try:
        os.replace(temp, path)
    except IsADirectoryError as error:
        raise IsADirectoryError(error.errno, folder_in_place(path)) from error


def _reason(error: Exception) -> str:
    """Return the system's message without the error number and the file name, which differ from chunk to chunk."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
