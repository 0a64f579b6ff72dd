"""A tier with one file per entry in a folder that threads and processes share.

The index, a SQLite file, has one row per entry. The entry's file is renamed into place inside the
transaction that adds the row, so a killed process leaves an entry whole or absent. Opening the tier
corrects rows and files that do not match.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

from ragfuse.errors import StoreError
from ragfuse.plan.evict import Evictor
from ragfuse.settings import Settings
from ragfuse.store.blobs import MAX_HEADER_NBYTES, BlobTier, Header
from ragfuse.store.database import Database, Row
from ragfuse.store.folder import fsync_folder, locked, make_folder, open_file, open_folder, refusal
from ragfuse.store.tier import EntryMeta, ReadLayers, victims
from ragfuse.types.keys import ChunkKey, digest
from ragfuse.types.kv import Entry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries(
    key TEXT PRIMARY KEY, sizes TEXT NOT NULL, n_tokens INTEGER NOT NULL, n_layers INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_use ON entries(last_used);
CREATE INDEX IF NOT EXISTS by_size ON entries(nbytes);
"""
_ENTRIES = "SELECT key, sizes, n_tokens, n_layers, last_used, hits, pinned FROM entries"
_OLDEST = " ORDER BY last_used, rowid"
_WITH_KEYS = " WHERE key IN (SELECT value FROM json_each(?))"
_PUBLISH = """
INSERT INTO entries(key, sizes, n_tokens, n_layers, nbytes, last_used) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT(key) DO UPDATE SET sizes = excluded.sizes, n_tokens = excluded.n_tokens,
n_layers = excluded.n_layers,
    nbytes = excluded.nbytes, last_used = excluded.last_used
"""
_NBYTES = "SELECT coalesce(sum(nbytes), 0) FROM entries"
_OTHERS = f"SELECT ({_NBYTES}) - coalesce((SELECT nbytes FROM entries WHERE key = ?), 0)"
_TOUCH = f"UPDATE entries SET last_used = max(last_used, ?), hits = hits + ?{_WITH_KEYS}"
_PIN = f"UPDATE entries SET pinned = ?{_WITH_KEYS}"
_REMOVE = f"DELETE FROM entries{_WITH_KEYS}"
_ABANDONED_S = 3600.0
"""A temporary file older than this many seconds is assumed to be left by a killed writer."""


def chunk_path(root: Path, key: ChunkKey | str) -> Path:
    """Return the path of an entry's file."""
    name = digest("file", str(key))
    return root / "chunks" / name[:2] / f"{name}.kv"


class DiskTier(BlobTier):
    """A tier in a folder. Opening the tier evicts nothing, even if the folder has more than
    `capacity` bytes. The next write evicts.

    Args:
        path: The folder; created if missing.
        capacity: Maximum bytes that all entries together may occupy.
        evict: The eviction policy.
        name: Name of the tier.
        clock: Returns the time in seconds since the epoch.

    Raises:
        StoreError: The folder cannot be used.
    """

    remote = False
    pins = True
    refusals = (OSError, StoreError)

    def __init__(
        self,
        path: str | Path,
        capacity: int,
        evict: Evictor,
        *,
        name: str = "disk",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, str(path), capacity=capacity)
        self.path = open_folder(Path(path).expanduser())
        self._evict, self._clock = evict, clock
        try:
            make_folder(self.path / "chunks")
            self._index = Database(self.path, "index.sqlite", _SCHEMA)
            with locked(self.path / "lock"):
                self._reconcile()
        except OSError as error:
            raise refusal(self.path, error) from error

    @classmethod
    def open(cls, url: str, settings: Settings, evict: Evictor, name: str) -> Self:
        """Open the tier in the folder `url`. The capacity is `tier_bytes` of the settings."""
        return cls(url, settings.tier_bytes, evict, name=name)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._ask("be weighed", lambda: int(self._index.query(_NBYTES)[0][0]), 0)

    def stat(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys, as listed in the index. Files are not checked."""
        return {entry.key: entry for entry in self._found(_WITH_KEYS, (_json(keys),))}

    def list(self) -> Sequence[Entry]:
        """Return all entries, least recently used first."""
        return self._found(_OLDEST)

    def get(self, key: ChunkKey, layers: range, level: str | None = None) -> ReadLayers | None:
        """Read layers (see `Tier.get`). A damaged entry is deleted and counted as corrupt."""
        found = super().get(key, layers, level)
        if found is not None and layers.start == 0:
            self._use([key], hits=1)
        return found

    def expect(self, keys: Iterable[ChunkKey], layers: range, level: str | None = None) -> None:
        """Ask the operating system to read these layers ahead, if the system supports that."""
        for key in keys if hasattr(os, "posix_fadvise") and not self._closed else ():
            with suppress(OSError, ValueError):
                header = self._headers.get(key) or self._header(key)
                if wanted := header.meta.pieces(layers, level):
                    begin, end = header.span(wanted)
                    with chunk_path(self.path, key).open("rb") as file:
                        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)

    def pin(self, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Pin or unpin entries. Pinned entries are not evicted. Pins outlive the process."""
        values = int(pinned), _json(keys)
        self._ask("pin entries", lambda: self._index.change(_PIN, values), 0)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Set the last use of these entries to now, without counting a hit."""
        self._use(keys, hits=0)

    def close(self) -> None:
        """Close the index."""
        if not self._closed:
            super().close()
            self._index.close()

    # the backend

    def _read(self, name: str, begin: int, end: int) -> memoryview:
        view = torch.empty(end - begin, dtype=torch.uint8).numpy().data
        with chunk_path(self.path, name).open("rb") as file:
            file.seek(begin)
            return view[: file.readinto(view)]

    def _write(self, key: ChunkKey, meta: EntryMeta, parts: Sequence[bytes | memoryview]) -> bool:
        path = chunk_path(self.path, key)
        nbytes = sum(map(len, parts))
        if nbytes > self.capacity:
            self.counts.add("refused")
            return False
        temp = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
        make_folder(path.parent)
        try:
            with os.fdopen(open_file(temp, os.O_WRONLY | os.O_EXCL), "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            with self._index.write() as transaction:
                if not self._make_room(transaction, key, nbytes):
                    self.counts.add("refused")
                    return False
                _publish(transaction, meta.entry(key, self.name, nbytes, self._clock()))
                os.replace(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        fsync_folder(path.parent)
        return True

    def _remove(self, names: Sequence[str]) -> int:
        with self._index.write() as transaction:
            return self._delete(transaction, names)

    def _missing(self, key: ChunkKey) -> None:
        """Remove the row of a missing file, unless another process has just written the file."""
        with self._index.write() as transaction:
            if not chunk_path(self.path, key).exists() and _remove(transaction, [key]):
                self._corrupt(key, "the entry's file is missing")

    # internal

    def _found(self, which: str, named: Sequence[str] = ()) -> Sequence[Entry]:
        """Return the entries that the SQL clause `which` selects; no entries if the index fails."""
        none: Sequence[Row] = ()
        sql = _ENTRIES + which
        rows = self._ask("look up entries", lambda: self._index.query(sql, named), none)
        return [*self._entries(rows)]

    def _entries(self, rows: Iterable[Row]) -> Iterator[Entry]:
        """Yield the entries of rows; skip damaged rows."""
        for key, sizes, n_tokens, n_layers, last_used, hits, pinned in rows:
            with suppress(ValueError, TypeError):
                parsed = ChunkKey.parse(key), self.name, n_tokens, n_layers, json.loads(sizes)
                yield Entry(*parsed, last_used, hits, bool(pinned))

    def _use(self, keys: Iterable[ChunkKey], hits: int) -> None:
        """Record a use of entries, unless another write is in progress, so that no read waits."""
        with suppress(StoreError), self._index.write(0.0) as transaction:
            transaction.execute(_TOUCH, (self._clock(), hits, _json(keys)))

    def _make_room(self, transaction: sqlite3.Connection, key: ChunkKey, nbytes: int) -> bool:
        """Evict entries until `nbytes` fit. If impossible, evict nothing and return False."""
        (held,) = transaction.execute(_OTHERS, (str(key),)).fetchone()
        excess = held + nbytes - self.capacity
        if excess <= 0:
            return True
        entries = self._entries(transaction.execute(_ENTRIES + _OLDEST))
        others = (entry for entry in entries if entry.key != key)
        doomed = victims(self._evict, others, excess)
        self.counts.add("evicted", self._delete(transaction, doomed or ()))
        return doomed is not None

    def _delete(self, transaction: sqlite3.Connection, keys: Sequence[ChunkKey | str]) -> int:
        """Delete files, then rows. If the process dies in between, reading the entry is a miss."""
        for key in keys:
            chunk_path(self.path, key).unlink(missing_ok=True)
        return _remove(transaction, keys)

    def _reconcile(self) -> None:
        """Make rows and files agree while no other process writes: add missing rows of whole files,
        delete damaged and abandoned files, remove rows without a file.
        """
        with self._index.write() as transaction:
            named = transaction.execute("SELECT key, nbytes FROM entries")
            rows = {chunk_path(self.path, key): (key, nbytes) for key, nbytes in named}
            for path in (self.path / "chunks").glob("*/*"):
                with suppress(FileNotFoundError):  # a temporary file, renamed since the listing
                    stat = path.stat()
                    key, nbytes = rows.pop(path, ("", -1))
                    if path.suffix == ".kv" and nbytes != stat.st_size:
                        self._settle(transaction, path, key)
                    elif path.suffix == ".tmp" and time.time() - stat.st_mtime > _ABANDONED_S:
                        path.unlink()
            for key, _ in rows.values():
                _remove(transaction, [key])
                self._corrupt(key, "the entry's file is missing")

    def _settle(self, transaction: sqlite3.Connection, path: Path, key: str) -> None:
        """If the file is whole, write its row. Otherwise delete the file and the row of `key`."""
        try:
            with path.open("rb") as file:
                header = Header.parse(file.read(MAX_HEADER_NBYTES))
            stat = path.stat()
            if chunk_path(self.path, header.key) != path or stat.st_size != header.nbytes:
                raise ValueError(f"the file has another name or size than entry {header.key}")
            entry = header.meta.entry(header.key, self.name, header.nbytes, stat.st_mtime)
            _publish(transaction, entry)
        except ValueError as error:
            self._corrupt(path.name, error)
            path.unlink()
            _remove(transaction, [key])


def _publish(transaction: sqlite3.Connection, entry: Entry) -> None:
    """Add or replace the row of an entry; hits and pin of a replaced row are kept."""
    row = (entry.n_tokens, entry.n_layers, entry.nbytes, entry.last_used)
    transaction.execute(_PUBLISH, (str(entry.key), json.dumps(dict(entry.sizes)), *row))


def _remove(transaction: sqlite3.Connection, keys: Iterable[ChunkKey | str]) -> int:
    """Remove the rows of entries; return the number removed."""
    return transaction.execute(_REMOVE, (_json(keys),)).rowcount


def _json(keys: Iterable[ChunkKey | str]) -> str:
    return json.dumps([str(key) for key in keys])
