"""What is in a disk tier: one row per entry, one per write under way. Sizes here are those of whole files.

The index decides nothing and touches no chunk file; `disk.py` does both inside the transactions opened here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from ragfuse.core import FORMAT_VERSION, ChunkKey, Entry
from ragfuse.store.database import Database, Row
from ragfuse.store.tier import EntryMeta

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries(
    key TEXT PRIMARY KEY, level TEXT NOT NULL, n_tokens INTEGER NOT NULL, n_layers INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS writing(
    temp TEXT PRIMARY KEY, key TEXT NOT NULL, owner TEXT NOT NULL, nbytes INTEGER NOT NULL
);
"""
_NBYTES = "SELECT (SELECT coalesce(sum(nbytes), 0) FROM entries) + (SELECT coalesce(sum(nbytes), 0) FROM writing)"
_ENTRIES = "SELECT key, level, n_tokens, n_layers, nbytes, last_used, hits, pinned FROM entries"
_AMONG = " WHERE key IN (SELECT value FROM json_each(?))"
_PUBLISH = """
INSERT INTO entries(key, level, n_tokens, n_layers, nbytes, last_used) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT(key) DO UPDATE SET level = excluded.level, n_tokens = excluded.n_tokens, n_layers = excluded.n_layers,
    nbytes = excluded.nbytes, last_used = excluded.last_used
"""
_TOUCH = "UPDATE entries SET last_used = max(last_used, ?), hits = hits + ? WHERE key = ?"


class Index:
    """The rows of one folder, shared by all its processes. Methods with a connection run in its transaction."""

    def __init__(self, path: Path, tier: str) -> None:
        self._database = Database(path, _SCHEMA, FORMAT_VERSION)
        self._tier = tier

    def write(self, *, wait: bool = True) -> AbstractContextManager[sqlite3.Connection]:
        """A transaction, alone among all processes."""
        return self._database.write(wait=wait)

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def nbytes(self) -> int:
        """Bytes of entries and of writes under way."""
        total: int = self._database.query(_NBYTES)[0][0]
        return total

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """Entries under `keys`, or all, least recently used first: one query."""
        return self._entries(self._database.query(*_select(keys)))

    def entries_in(self, transaction: sqlite3.Connection, keys: Iterable[ChunkKey] | None = None) -> list[Entry]:
        """The same inside a transaction."""
        return list(self._entries(transaction.execute(*_select(keys)).fetchall()).values())

    def _entries(self, rows: Iterable[Row]) -> dict[ChunkKey, Entry]:
        found = {}
        for text, level, n_tokens, n_layers, nbytes, last_used, hits, pinned in rows:
            key = ChunkKey.parse(text)
            found[key] = Entry(key, self._tier, n_tokens, n_layers, {level: nbytes}, last_used, hits, bool(pinned))
        return found

    @staticmethod
    def nbytes_in(transaction: sqlite3.Connection) -> int:
        """Bytes of entries and of writes under way, inside a transaction."""
        total: int = transaction.execute(_NBYTES).fetchone()[0]
        return total

    @staticmethod
    def begin(transaction: sqlite3.Connection, temp: str, key: ChunkKey, owner: str, nbytes: int) -> None:
        """A write of `nbytes` starts: its bytes count from now on."""
        transaction.execute("INSERT INTO writing VALUES (?, ?, ?, ?)", (temp, str(key), owner, nbytes))

    @staticmethod
    def end(transaction: sqlite3.Connection, temp: str) -> None:
        """That write is over, whole or not."""
        transaction.execute("DELETE FROM writing WHERE temp = ?", (temp,))

    @staticmethod
    def under_way(transaction: sqlite3.Connection) -> list[tuple[str, str, str]]:
        """(temp, key, owner) of every write that was begun and not ended."""
        return transaction.execute("SELECT temp, key, owner FROM writing").fetchall()

    @staticmethod
    def publish(transaction: sqlite3.Connection, key: ChunkKey, meta: EntryMeta, nbytes: int, now: float) -> None:
        """The entry can be found from the commit on; hits and pin of an earlier one stay."""
        row = (str(key), meta.level, meta.n_tokens, len(meta.layers), nbytes, now)
        transaction.execute(_PUBLISH, row)

    @staticmethod
    def remove(transaction: sqlite3.Connection, keys: Iterable[ChunkKey]) -> int:
        """Forget entries; how many there were."""
        return transaction.execute(f"DELETE FROM entries{_AMONG}", (_json(keys),)).rowcount

    @staticmethod
    def resize(transaction: sqlite3.Connection, key: ChunkKey, nbytes: int) -> None:
        """The file has another size than was written down."""
        transaction.execute("UPDATE entries SET nbytes = ? WHERE key = ?", (nbytes, str(key)))

    @staticmethod
    def touch(transaction: sqlite3.Connection, used: Mapping[ChunkKey, tuple[float, int]]) -> None:
        """Entries were used last at these times, with so many more hits."""
        transaction.executemany(_TOUCH, [(when, hits, str(key)) for key, (when, hits) in used.items()])

    @staticmethod
    def pin(transaction: sqlite3.Connection, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Write down who is protected from eviction."""
        transaction.execute(f"UPDATE entries SET pinned = ?{_AMONG}", (int(pinned), _json(keys)))


def _json(keys: Iterable[ChunkKey]) -> str:
    return json.dumps([str(key) for key in keys])


def _select(keys: Iterable[ChunkKey] | None) -> tuple[str, tuple[str, ...]]:
    order = " ORDER BY last_used, rowid"
    return (_ENTRIES + order, ()) if keys is None else (_ENTRIES + _AMONG + order, (_json(keys),))
