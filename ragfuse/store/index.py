"""The SQLite index of a disk tier: one row per entry. Sizes are those of whole files.

The index makes no decisions and touches no chunk file; `disk.py` does both inside the transactions
opened here.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from ragfuse.store.database import Database, Row
from ragfuse.types.keys import ChunkKey
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


class Index(Database):
    """The index of one folder, shared by all its processes. Methods that take a transaction run
    inside it.

    Args:
        folder: The folder.
        tier: Name of the tier in the entries returned.
    """

    def __init__(self, folder: Path, tier: str) -> None:
        super().__init__(folder, "index.sqlite", _SCHEMA)
        self._tier = tier

    def nbytes(self) -> int:
        """Return the bytes of all entries."""
        return self.number(_NBYTES)

    def names(self) -> list[tuple[str, int]]:
        """Return the keys of all entries, each with its bytes."""
        return [(key, nbytes) for key, nbytes in self.query("SELECT key, nbytes FROM entries")]

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> Sequence[Entry]:
        """Return the entries with these keys (one query), or all, least recently used first."""
        where, arguments = ("", ()) if keys is None else (_WITH_KEYS, (_json(keys),))
        return [*self._entries(self.query(_ENTRIES + where + _OLDEST, arguments))]

    def oldest(self, transaction: sqlite3.Connection) -> Iterator[Entry]:
        """Yield every entry, least recently used first, lazily."""
        with closing(transaction.execute(_ENTRIES + _OLDEST)) as rows:
            yield from self._entries(rows)

    def _entries(self, rows: Iterable[Row]) -> Iterator[Entry]:
        """Yield the entries of rows; a damaged row is skipped."""
        for key, sizes, n_tokens, n_layers, last_used, hits, pinned in rows:
            with suppress(ValueError, TypeError):
                parsed = ChunkKey.parse(key), self._tier, n_tokens, n_layers, json.loads(sizes)
                yield Entry(*parsed, last_used, hits, bool(pinned))

    @staticmethod
    def excess(transaction: sqlite3.Connection, key: ChunkKey, nbytes: int, capacity: int) -> int:
        """Return the bytes by which the entries exceed the capacity once this one has so many
        bytes.
        """
        (others,) = transaction.execute(_OTHERS, (str(key),)).fetchone()
        return int(others) + nbytes - capacity

    @staticmethod
    def publish(transaction: sqlite3.Connection, entry: Entry) -> None:
        """Add the row of an entry, visible from the commit on; hits and pin of an older entry of
        that key stay.
        """
        row = (entry.n_tokens, entry.n_layers, entry.nbytes, entry.last_used)
        transaction.execute(_PUBLISH, (str(entry.key), json.dumps(dict(entry.sizes)), *row))

    @staticmethod
    def remove(transaction: sqlite3.Connection, keys: Iterable[ChunkKey | str]) -> int:
        """Remove the rows of entries, and return how many there were."""
        return transaction.execute(f"DELETE FROM entries{_WITH_KEYS}", (_json(keys),)).rowcount

    @staticmethod
    def touch(
        transaction: sqlite3.Connection, keys: Iterable[ChunkKey], when: float, hits: int
    ) -> None:
        """Record a use of these entries at a time (seconds since the epoch), and new hits."""
        transaction.execute(_TOUCH, (when, hits, _json(keys)))

    @staticmethod
    def pin(transaction: sqlite3.Connection, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Record whether entries are protected from eviction."""
        transaction.execute(
            f"UPDATE entries SET pinned = ?{_WITH_KEYS}", (int(pinned), _json(keys))
        )


def _json(keys: Iterable[ChunkKey | str]) -> str:
    return json.dumps([str(key) for key in keys])
