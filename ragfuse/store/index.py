"""The SQLite index of a disk tier: one row per entry, and one per write under way. Sizes are those of whole files.

The index makes no decisions and touches no chunk file; `disk.py` does both inside the transactions opened here.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

from ragfuse.store.database import Database, Row
from ragfuse.store.sizes import format_sizes, parse_sizes
from ragfuse.store.tier import LATEST_S, EntryMeta, entry_from_row
from ragfuse.types.keys import FORMAT_VERSION, ChunkKey
from ragfuse.types.kv import Entry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries(
    key TEXT PRIMARY KEY, sizes TEXT NOT NULL, n_tokens INTEGER NOT NULL, n_layers INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, last_used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS writing(
    temp TEXT PRIMARY KEY, key TEXT NOT NULL, owner TEXT NOT NULL, nbytes INTEGER NOT NULL
);
"""
_UPKEEP = (
    "CREATE INDEX IF NOT EXISTS by_use ON entries(last_used) WHERE NOT pinned",
    "CREATE TABLE IF NOT EXISTS total(id INTEGER PRIMARY KEY, entries INTEGER, nbytes INTEGER)",
    "CREATE TABLE IF NOT EXISTS notes(name TEXT PRIMARY KEY, note TEXT NOT NULL)",
    "INSERT OR IGNORE INTO total SELECT 0, count(*), coalesce(sum(nbytes), 0) FROM entries "
    "WHERE NOT EXISTS (SELECT 1 FROM total)",
    "CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON entries "
    "BEGIN UPDATE total SET entries = entries + 1, nbytes = nbytes + new.nbytes; END",
    "CREATE TRIGGER IF NOT EXISTS other AFTER UPDATE OF nbytes ON entries "
    "BEGIN UPDATE total SET nbytes = nbytes + new.nbytes - old.nbytes; END",
    "CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON entries "
    "BEGIN UPDATE total SET entries = entries - 1, nbytes = nbytes - old.nbytes; END",
)
"""Index and triggers so that a write needs no sum and no sorting over all rows, even with a million entries."""
_NBYTES = "SELECT (SELECT nbytes FROM total) + (SELECT coalesce(sum(nbytes), 0) FROM writing)"
_ENTRIES = "SELECT key, sizes, n_tokens, n_layers, nbytes, last_used, hits, pinned FROM entries"
_OLDEST = " WHERE NOT pinned ORDER BY last_used, rowid"
_WITH_KEYS = " WHERE key IN (SELECT value FROM json_each(?))"
_PUBLISH = """
INSERT INTO entries(key, sizes, n_tokens, n_layers, nbytes, last_used) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT(key) DO UPDATE SET sizes = excluded.sizes, n_tokens = excluded.n_tokens, n_layers = excluded.n_layers,
    nbytes = excluded.nbytes, last_used = excluded.last_used
"""
_PAGE = "SELECT rowid, key, nbytes FROM entries WHERE rowid > ? ORDER BY rowid LIMIT 10000"
_LISTED = _ENTRIES.replace("SELECT", "SELECT rowid,") + " WHERE rowid > ? ORDER BY rowid LIMIT 1000"
_DAMAGED = """
SELECT rowid FROM entries NOT INDEXED
WHERE typeof(key) != 'text' OR typeof(sizes) != 'text' OR typeof(nbytes) != 'integer' OR nbytes < 0
    OR typeof(n_tokens) != 'integer' OR typeof(n_layers) != 'integer' OR typeof(last_used) != 'real'
    OR typeof(hits) != 'integer' OR typeof(pinned) != 'integer'
"""
_ENTRIES_WITH_ROWID = _ENTRIES.replace("SELECT", "SELECT rowid,") + " NOT INDEXED"
_NOT_PLAIN = "SELECT rowid, key, sizes FROM entries NOT INDEXED WHERE key || sizes GLOB '*[^ -~]*'"
_DELETE_DAMAGED_WRITES = "DELETE FROM writing WHERE temp || owner GLOB '*[^ -~]*' OR typeof(nbytes) != 'integer'"
_SUM = "INSERT OR REPLACE INTO total SELECT 0, count(*), coalesce(sum(nbytes), 0) FROM entries"
_TOUCH = "UPDATE entries SET last_used = min(max(last_used, ?), ?), hits = hits + ? WHERE key = ?"
_SETTLE_USES = f"UPDATE entries SET last_used = ?1 WHERE NOT pinned AND last_used > ?1 AND last_used <= {LATEST_S!r}"


class Index:
    """The index of one folder, shared by all its processes. Methods that take a transaction run inside it.

    A last use that lies in the future, because a clock ran ahead, counts as now.

    Args:
        path: The SQLite file.
        tier: Name of the tier in the entries returned.
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(self, path: Path, tier: str, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(path, _SCHEMA, FORMAT_VERSION)
        self._tier, self._clock = tier, clock
        with self.write() as transaction:
            self._prepare(transaction)

    def write(self, *, wait_s: float | None = None) -> AbstractContextManager[sqlite3.Connection]:
        """Open a write transaction, exclusive among all processes (`Database.write`)."""
        return self._database.write(wait_s=wait_s)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @property
    def lacks_room(self) -> bool:
        """Whether it was opened on a disk without room, and is changed in place for that."""
        return self._database.in_place

    def nbytes(self) -> int:
        """Return the bytes of all entries and of writes under way."""
        return _count(self._database.query(_NBYTES))

    def __len__(self) -> int:
        return _count(self._database.query("SELECT entries FROM total"))

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield (key, nbytes) of every entry, read page by page; others may write meanwhile."""
        last = -1
        while page := self._database.query(_PAGE, (last,)):
            last = page[-1][0]
            yield from ((key, nbytes) for _, key, nbytes in page if _are_words([key]))

    def note(self, name: str) -> str:
        """Return the note of that name, "" if there is none."""
        found = self._database.query("SELECT note FROM notes WHERE name = ?", (name,))
        return str(found[0][0]) if found else ""

    def entries(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, Entry]:
        """Return the entries with these keys (one query), or all (page by page), least recently used first."""
        if keys is not None:
            return self._entries(self._database.query(*_select(keys)))
        return {entry.key: entry for entry in sorted(self._all(), key=lambda entry: entry.last_used)}

    def _all(self) -> Iterator[Entry]:
        """Yield every entry, page by page, so that others can read and write in between."""
        last = -1
        while page := self._database.query(_LISTED, (last,)):
            last = page[-1][0]
            yield from self._parsed(row[1:] for row in page)

    def entries_in(self, transaction: sqlite3.Connection, keys: Iterable[ChunkKey]) -> list[Entry]:
        """Return the entries with these keys, inside a transaction."""
        return list(self._entries(transaction.execute(*_select(keys)).fetchall()).values())

    def oldest(self, transaction: sqlite3.Connection) -> Iterator[Entry]:
        """Yield every entry that is not pinned, least recently used first, lazily.

        Uses that lie in the future are first changed to now, so that these entries age, too.
        """
        transaction.execute(_SETTLE_USES, (self._clock(),))
        with closing(transaction.execute(_ENTRIES + _OLDEST)) as rows:
            yield from self._parsed(rows)

    def _entries(self, rows: Iterable[Row]) -> dict[ChunkKey, Entry]:
        return {entry.key: entry for entry in self._parsed(rows)}

    def _parsed(self, rows: Iterable[Row]) -> Iterator[Entry]:
        """Yield the entries of rows. Damaged rows are skipped; `upkeep.py` removes them."""
        now: float | None = None
        for text, sizes_text, n_tokens, n_layers, nbytes, last_used, hits, pinned in rows:
            try:
                if not all(isinstance(number, int) for number in (n_tokens, n_layers, nbytes, hits)):
                    raise ValueError("not numbers")
                key, sizes = ChunkKey.parse(text), parse_sizes(sizes_text, nbytes)
                fields = (key, self._tier, n_tokens, n_layers, sizes, float(last_used), hits, bool(pinned))
                entry = entry_from_row(*fields)
            except (ValueError, TypeError, AttributeError):
                continue
            now = self._clock() if now is None else now
            yield entry if entry.last_used <= now else replace(entry, last_used=now)

    @staticmethod
    def nbytes_in(transaction: sqlite3.Connection) -> int:
        """Return the bytes of all entries and of writes under way, inside a transaction."""
        return _count(transaction.execute(_NBYTES).fetchall())

    @staticmethod
    def begin(transaction: sqlite3.Connection, temp: str, key: ChunkKey, owner: str, nbytes: int) -> None:
        """Record that a write of `nbytes` begins; its bytes count from now on."""
        transaction.execute("INSERT INTO writing VALUES (?, ?, ?, ?)", (temp, str(key), owner, nbytes))

    @staticmethod
    def end(transaction: sqlite3.Connection, temp: str) -> None:
        """Record that a write has ended, complete or not."""
        transaction.execute("DELETE FROM writing WHERE temp = ?", (temp,))

    @staticmethod
    def has(transaction: sqlite3.Connection, text: str) -> bool:
        """Return whether there is an entry with this key, given as text."""
        return bool(transaction.execute("SELECT 1 FROM entries WHERE key = ?", (text,)).fetchone())

    def is_sound(self) -> bool:
        """Return whether the table and its SQL indexes agree; takes a while for many entries."""
        return self._database.is_sound("entries")

    def mend(self, transaction: sqlite3.Connection, is_sound: bool) -> int:
        """Remove damaged rows and recompute the totals.

        Args:
            transaction: An open write transaction.
            is_sound: The result of `is_sound`; if False, the table is rebuilt even without damaged rows.

        Returns:
            How many rows were removed.
        """
        damaged = [rowid for (rowid,) in transaction.execute(_DAMAGED)]
        damaged += [rowid for rowid, *words in transaction.execute(_NOT_PLAIN) if not _are_words(words)]
        rows = transaction.execute(_ENTRIES_WITH_ROWID)
        damaged += [rowid for rowid, *row in rows if not any(self._parsed([tuple(row)]))]
        if damaged or not is_sound:
            self._database.rebuild(transaction, "entries", damaged)
            self._prepare(transaction)
        transaction.execute(_DELETE_DAMAGED_WRITES)
        transaction.execute(_SUM)
        return len(set(damaged))

    @staticmethod
    def _prepare(transaction: sqlite3.Connection) -> None:
        for statement in _UPKEEP:
            transaction.execute(statement)

    @staticmethod
    def under_way(transaction: sqlite3.Connection) -> list[tuple[str, str, str, int]]:
        """Return (temporary file, key, owner, nbytes) of every write that has begun and not ended."""
        rows = transaction.execute("SELECT temp, key, owner, nbytes FROM writing").fetchall()
        return [row for row in rows if _are_words((row[0], row[2]))]

    @staticmethod
    def write_note(transaction: sqlite3.Connection, name: str, note: str) -> None:
        """Save a note about the folder, replacing an earlier one of that name."""
        transaction.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, note))

    @staticmethod
    def publish(transaction: sqlite3.Connection, key: ChunkKey, meta: EntryMeta, nbytes: int, used: float) -> None:
        """Add the row of an entry, visible from the commit on; hits and pin of an older entry of that key stay."""
        row = (str(key), format_sizes(meta.sizes), meta.n_tokens, meta.n_layers, nbytes, used)
        transaction.execute(_PUBLISH, row)

    @staticmethod
    def remove(transaction: sqlite3.Connection, keys: Iterable[ChunkKey | str]) -> int:
        """Remove the rows of entries, and return how many there were."""
        return transaction.execute(f"DELETE FROM entries{_WITH_KEYS}", (_json(keys),)).rowcount

    def touch(self, transaction: sqlite3.Connection, used: Mapping[ChunkKey, tuple[float, int]]) -> None:
        """Record uses: by key, the last use (seconds since the epoch) and the number of new hits."""
        now = self._clock()
        transaction.executemany(_TOUCH, [(when, now, hits, str(key)) for key, (when, hits) in used.items()])

    @staticmethod
    def pin(transaction: sqlite3.Connection, keys: Iterable[ChunkKey], pinned: bool) -> None:
        """Record whether entries are protected from eviction."""
        transaction.execute(f"UPDATE entries SET pinned = ?{_WITH_KEYS}", (int(pinned), _json(keys)))


def _json(keys: Iterable[ChunkKey | str]) -> str:
    return json.dumps([str(key) for key in keys])


def _are_words(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _count(rows: Sequence[Row]) -> int:
    """Return the number in a single row; 0 if it is damaged, until `mend` repairs it."""
    found = rows[0][0] if rows else 0
    return max(0, int(found)) if isinstance(found, int | float) and abs(found) < 1e18 else 0


def _select(keys: Iterable[ChunkKey]) -> tuple[str, tuple[str, ...]]:
    return f"{_ENTRIES}{_WITH_KEYS} ORDER BY last_used, rowid", (_json(keys),)
