"""A tier that stores each entry as a file in one folder, which threads and processes may share.

`chunkfile.py` has the file format, `index.py` the table of entries. A file appears by a rename inside the transaction
that makes room for it and adds its row, so a process that is killed leaves an entry whole or absent; what else it
leaves is put right when the folder is opened next.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Self, TypeVar

from torch import Tensor

from ragfuse.process.lru import LRU
from ragfuse.settings import Settings, SharedWith
from ragfuse.store.access import make_folder
from ragfuse.store.chunkfile import ChunkFile, offsets, pack_header, write_chunk
from ragfuse.store.folder import describe_error, fsync_folder, locked, open_folder, refusal
from ragfuse.store.index import Index
from ragfuse.store.tier import EntryMeta, Evictor, Freed, Tier, victims
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import Entry

log = logging.getLogger("ragfuse.store")

_Found = TypeVar("_Found")
_TOUCHES = 256
_TOUCH_INTERVAL_S = 5.0
_CLOSE_S = 1.0
_ABANDONED_S = 3600.0
"""Seconds after which a temporary file belongs to a writer that was killed."""
WARN_AGAIN_S = 60.0
"""Seconds before an error is logged as a warning again."""


def chunk_path(root: Path, key: ChunkKey | str) -> Path:
    """Return the path of an entry's file."""
    name = digest("file", str(key))
    return root / "chunks" / name[:2] / f"{name}.kv"


class DiskTier(Tier):
    """A tier in a folder. Opening evicts nothing: if more than `capacity` is stored, the next write makes room.

    Args:
        path: The folder; it is created if it is missing.
        capacity: Most bytes that its entries may occupy.
        evict: The eviction policy.
        open_files: How many files stay open between reads.
        name: Name of the tier.
        clock: Returns the time in seconds since the epoch.
        shared_with: Who else may use the folder.

    Raises:
        StoreError: The folder cannot be used.
    """

    pins = True

    def __init__(
        self,
        path: str | Path,
        capacity: int,
        evict: Evictor,
        *,
        open_files: int = 64,
        name: str = "disk",
        clock: Callable[[], float] = time.time,
        shared_with: SharedWith = "nobody",
    ) -> None:
        super().__init__(name, capacity)
        self.path = open_folder(Path(path).expanduser(), shared_with)
        self._evict, self._clock = evict, clock
        self._files = LRU[ChunkKey, ChunkFile](open_files)  # a file that leaves is closed after its last reader
        self._touched: dict[ChunkKey, tuple[float, int]] = {}
        self._touched_at, self._touch_lock = clock(), threading.Lock()
        self._closed, self._warned_at = False, -WARN_AGAIN_S
        try:
            make_folder(self.path / "chunks")
            with locked(self.path / "lock"):
                self._index = Index(self.path / "index.sqlite", name)
                self._freed_at_opening = self._reconcile()
        except (OSError, sqlite3.Error) as error:
            raise refusal(self.path, describe_error(self.path, error)) from error

    @classmethod
    def open(cls, url: str, settings: Settings, evict: Evictor, name: str) -> Self:
        """Open the tier in the folder `url`, with capacity and sharing from the settings."""
        return cls(url, settings.tier_bytes, evict, name=name, shared_with=settings.shared_with)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._ask("weigh", lambda: self._index.nbytes(), 0)

    @property
    def answers(self) -> bool:
        """Whether the index can be read."""
        return self._ask("read", lambda: self._index.nbytes() >= 0, False)

    def stat(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys, as the index lists them; the file of one may be missing."""
        return {entry.key: entry for entry in self._listed(keys)}

    def list(self) -> Sequence[Entry]:
        """Return all entries, least recently used first."""
        return self._listed(None)

    def get(
        self, key: ChunkKey, layers: range, level: str | None = None
    ) -> tuple[EntryMeta, *tuple[Tensor, ...]] | None:
        """Return an entry's description and some layers (`Tier.get`). A damaged entry is dropped and counted."""
        if self._closed:
            return None
        try:
            file = self._open_file(key, is_new=layers.start == 0)
            wanted = file.meta.pieces(layers, level)
            blobs = file.read(wanted) if wanted is not None else []
        except (FileNotFoundError, ValueError) as error:
            self._drop(key, error)
            return None
        except OSError as error:  # the medium, not the entry: too many open files, an I/O error
            self._failed("read", error)
            return None
        if not blobs:
            return None
        self._touch([key], hits=int(layers.start == 0))
        return file.meta, *blobs

    def expect(self, keys: Iterable[ChunkKey], layers: range, level: str | None = None) -> None:
        """Ask the operating system to prefetch these layers; errors are left to the read that follows."""
        for key in () if self._closed else keys:
            with suppress(OSError, ValueError):
                file = self._open_file(key)
                if wanted := file.meta.pieces(layers, level):
                    file.expect(wanted)

    def put(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        """Store an entry (`Tier.put`) as one file, which appears whole or not at all."""
        return self._ask("write", lambda: self._put(key, meta.sealed(blobs), blobs), False)

    def delete(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries and return how many there were."""
        doomed = [*keys]

        def remove() -> int:
            with self._index.write() as transaction:
                return self._remove(transaction, doomed)

        return self._ask("delete entries in", remove, 0)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Protect entries from eviction, or stop protecting them. Pins outlive the process."""

        def write() -> None:
            with self._index.write() as transaction:
                self._index.pin(transaction, keys, pinned)

        self._ask("pin entries in", write, None)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit."""
        if not self._closed:
            self._touch(keys, hits=0)
            self._flush_touches(wait_s=0.0)

    def tidy(self) -> Freed:
        """Remove what interrupted writes left behind, and make rows and files agree.

        Returns:
            What was freed, at the first call with what opening the tier has freed already.
        """
        freed, self._freed_at_opening = self._freed_at_opening, Freed()
        return freed.plus(self._ask("tidy", self._reconcile, Freed()))

    def close(self) -> None:
        """Write the latest uses to the index and close all files. Closing twice does nothing."""
        if not self._closed:
            self._flush_touches(wait_s=_CLOSE_S)
            self._closed = True
            self._files.clear()
            self._index.close()

    # inside

    def _ask(self, doing: str, call: Callable[[], _Found], otherwise: _Found) -> _Found:
        """Return what `call` returns, or `otherwise` if the medium fails, which is counted."""
        if self._closed:
            return otherwise
        try:
            return call()
        except (OSError, sqlite3.Error) as error:
            self._failed(doing, error)
            return otherwise

    def _failed(self, doing: str, error: Exception) -> None:
        self.counts.add("failed")
        now = time.monotonic()
        level = logging.WARNING if now - self._warned_at >= WARN_AGAIN_S else logging.DEBUG
        self._warned_at = now if level == logging.WARNING else self._warned_at
        message = "Could not %s %s (tier %s): %s; the next such error is logged after %g s"
        log.log(level, message, doing, self.path, self.name, describe_error(self.path, error), WARN_AGAIN_S)

    # reading

    def _listed(self, keys: Iterable[ChunkKey] | None) -> Sequence[Entry]:
        none: Sequence[Entry] = ()
        found = self._ask("look up entries in", lambda: self._index.entries(keys), none)
        with self._touch_lock:
            touched = {entry.key: self._touched.get(entry.key, (entry.last_used, 0)) for entry in found}
        return [
            replace(
                entry, last_used=max(entry.last_used, touched[entry.key][0]), hits=entry.hits + touched[entry.key][1]
            )
            for entry in found
        ]

    def _open_file(self, key: ChunkKey, *, is_new: bool = False) -> ChunkFile:
        """Return the open file of an entry.

        A reader that has read earlier layers may finish on a file that was deleted since; a new one opens it again.
        """
        file = self._files.get(key)
        if file is not None and not (is_new and file.is_unlinked):
            return file
        file = ChunkFile(chunk_path(self.path, key))
        if file.header.key != key:
            raise ValueError(f"it holds {file.header.key}")
        self._files.add(key, file)
        if file.is_unlinked:  # deleted between opening and adding
            self._files.discard([key])
        return file

    def _drop(self, key: ChunkKey, why: Exception) -> None:
        """Drop an entry that cannot be read, unless another process deleted or rewrote it meanwhile."""
        self._files.discard([key])
        is_missing = isinstance(why, FileNotFoundError)

        def remove() -> None:
            with self._index.write() as transaction:
                if not (is_missing and chunk_path(self.path, key).exists()) and self._remove(transaction, [key]):
                    self._corrupt(key, "its file is gone" if is_missing else str(why))

        self._ask("drop an entry in", remove, None)

    def _corrupt(self, what: object, why: str) -> None:
        self.counts.add("corrupt")
        message = "Deleted the damaged entry %s from tier %s; it is computed again when needed: %s"
        log.warning(message, what, self.name, why)

    def _touch(self, keys: Iterable[ChunkKey], *, hits: int) -> None:
        """Note uses in memory; the index is updated only now and then."""
        now = self._clock()
        with self._touch_lock:
            for key in keys:
                self._touched[key] = (now, self._touched.get(key, (now, 0))[1] + hits)
            is_due = len(self._touched) >= _TOUCHES or not 0 <= now - self._touched_at < _TOUCH_INTERVAL_S
            if is_due:
                self._touched_at = now
        if is_due:
            self._flush_touches(wait_s=0.0)

    def _flush_touches(self, *, wait_s: float) -> None:
        with suppress(sqlite3.Error), self._index.write(wait_s) as transaction:
            self._write_touches(transaction)

    def _write_touches(self, transaction: sqlite3.Connection) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        self._index.touch(transaction, touched)

    # writing

    def _put(self, key: ChunkKey, meta: EntryMeta, blobs: Sequence[Tensor]) -> bool:
        path, header = chunk_path(self.path, key), pack_header(key, meta)
        nbytes = offsets(len(header), meta)[-1]
        if nbytes > self.capacity:
            self.counts.add("refused")
            return False
        temp = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
        make_folder(path.parent)
        try:
            write_chunk(temp, header, blobs)
            with self._index.write() as transaction:
                if not self._make_room(transaction, key, nbytes):
                    self.counts.add("refused")
                    return False
                self._index.publish(transaction, meta.entry(key, self.name, nbytes, self._clock()))
                os.replace(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        self._files.discard_where(attrgetter("is_unlinked"))
        fsync_folder(path.parent)
        return True

    def _make_room(self, transaction: sqlite3.Connection, key: ChunkKey, nbytes: int) -> bool:
        """Evict entries until `nbytes` fit; return False, and evict nothing, if they cannot fit."""
        self._write_touches(transaction)
        excess = self._index.excess(transaction, key, nbytes, self.capacity)
        if excess <= 0:
            return True
        others = (entry for entry in self._index.oldest(transaction) if entry.key != key)
        doomed = victims(self._evict, others, excess)
        self.counts.add("evicted", self._remove(transaction, doomed or ()))
        return doomed is not None

    def _remove(self, transaction: sqlite3.Connection, keys: Sequence[ChunkKey]) -> int:
        """Delete files, then rows: if killed in between, a row without a file is left, and that reads as a miss."""
        for key in keys:
            chunk_path(self.path, key).unlink(missing_ok=True)
        self._files.discard(keys)
        with self._touch_lock:
            for key in keys:
                self._touched.pop(key, None)
        return self._index.remove(transaction, keys)

    def _reconcile(self) -> Freed:
        """Make rows and files agree: add a row for a file without one, remove a row whose file is missing.

        Others may write meanwhile, so every mismatch is checked again inside a transaction. Returns what was freed.
        """
        rows = {chunk_path(self.path, key): (key, nbytes) for key, nbytes in self._index.names()}
        stray = set[Path]()
        for path in (self.path / "chunks").glob("*/*"):
            with suppress(FileNotFoundError):  # deleted or written to its end meanwhile
                stat = path.stat()
                if path.suffix == ".kv" and rows.get(path, ("", -1))[1] == stat.st_size:
                    del rows[path]
                elif path.suffix == ".kv" or (path.suffix == ".tmp" and time.time() - stat.st_mtime > _ABANDONED_S):
                    stray.add(path)
        freed = Freed()
        if rows or stray:
            with self._index.write() as transaction:
                for path in stray:
                    freed = freed.plus(self._settle(transaction, path))
                for path, (key, _) in rows.items():
                    is_removed = not path.exists() and self._index.remove(transaction, [key])  # or it was evicted
                    if is_removed and path not in stray:  # or its damaged file was counted
                        self._corrupt(key, "its file is gone")
                        freed = freed.plus(Freed(orphans=1))
        return freed

    def _settle(self, transaction: sqlite3.Connection, path: Path) -> Freed:
        """Add the row of a whole file that has none; delete any other file."""
        try:
            file = ChunkFile(path)
            if chunk_path(self.path, file.header.key) != path:
                raise ValueError(f"it holds {file.header.key}")
            entry = file.meta.entry(file.header.key, self.name, file.header.nbytes, path.stat().st_mtime)
            self._index.publish(transaction, entry)
            return Freed()
        except FileNotFoundError:
            return Freed()
        except ValueError as error:
            if path.suffix == ".kv":
                self._corrupt(path.name, str(error))
        nbytes = path.stat().st_size
        path.unlink()
        return Freed(orphans=1, nbytes=nbytes)
