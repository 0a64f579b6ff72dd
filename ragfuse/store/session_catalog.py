"""The sessions in a catalog: the state of each as versioned JSON, its KV keys, and digests to find it by its messages.

`sessions/session.py` defines what a session is. Here its state is opaque; a write must name the version it replaces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from sqlite3 import Connection
from typing import Any, NamedTuple

from ragfuse.store.database import Database

SESSION_TABLES = ("sessions", "session_ends", "session_keys")
SESSION_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions(
    model TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, used REAL NOT NULL, turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL, state TEXT NOT NULL, PRIMARY KEY(model, id)
);
CREATE INDEX IF NOT EXISTS sessions_by_use ON sessions(used);
CREATE TABLE IF NOT EXISTS session_ends(
    model TEXT NOT NULL, prefix TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY(model, prefix, id)
);
CREATE INDEX IF NOT EXISTS session_ends_of ON session_ends(model, id);
CREATE TABLE IF NOT EXISTS session_keys(
    key TEXT NOT NULL, model TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY(key, model, id)
);
CREATE INDEX IF NOT EXISTS session_keys_of ON session_keys(model, id);
"""
_ORPHANS = """
SELECT key FROM session_keys AS mine WHERE model = ? AND id = ? AND NOT EXISTS (
    SELECT 1 FROM session_keys AS other
    WHERE other.key = mine.key AND NOT (other.model = mine.model AND other.id = mine.id))
"""


class SessionRow(NamedTuple):
    """A session without its state.

    Args:
        model: The tenant's model digest.
        id: Name of the session.
        version: Number of the version.
        used: Last use, in seconds since the epoch.
        turns: How many turns it has.
        tokens: How many tokens it has.
    """

    model: str
    id: str
    version: int
    used: float
    turns: int
    tokens: int


class SessionCatalog:
    """The sessions of a catalog. Threads and processes may share it.

    Every method raises StoreError if the catalog's file cannot be read or written.
    """

    def __init__(self, database: Database, store_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._database, self._store_errors = database, store_errors

    def get(self, model: str, id: str) -> tuple[int, float, dict[str, Any]] | None:
        """Return version, last use and state of a session, or None if there is none or its state is damaged."""
        sql = "SELECT version, used, state FROM sessions WHERE model = ? AND id = ?"
        with self._store_errors():
            rows = self._database.query(sql, (model, id))
        try:
            state = json.loads(rows[0][2]) if rows else None
        except ValueError:
            return None
        return (*rows[0][:2], state) if isinstance(state, dict) else None

    def put(
        self,
        row: SessionRow,
        state: Mapping[str, Any],
        ends: Iterable[str],
        keys: Iterable[str],
    ) -> bool:
        """Save a session, replacing version `row.version` of it (0: there is none yet).

        A session whose last use lies after `row.used`, which is now, gets now as its last use: a clock ran ahead.

        Args:
            row: The session.
            state: Its state, plain JSON types.
            ends: For each of its turns, a digest of all messages up to the turn's end.
            keys: Keys of its KV.

        Returns:
            False, with nothing changed, if another writer replaced that version first.
        """
        who = (row.model, row.id)
        with self._store_errors(), self._database.write() as transaction:
            stored = transaction.execute("SELECT version FROM sessions WHERE model = ? AND id = ?", who).fetchone()
            if (stored[0] if stored else 0) != row.version:
                return False
            self._drop(transaction, *who)
            values = (*who, row.version + 1, row.used, row.turns, row.tokens, json.dumps(dict(state)))
            transaction.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            transaction.execute("UPDATE sessions SET used = ?1 WHERE used > ?1", (row.used,))
            for table, names in (("session_ends(prefix, model, id)", ends), ("session_keys(key, model, id)", keys)):
                pairs = [(name, *who) for name in dict.fromkeys(names)]
                transaction.executemany(f"INSERT OR IGNORE INTO {table} VALUES (?, ?, ?)", pairs)
        return True

    def ending(self, model: str, prefixes: Sequence[str]) -> dict[str, str]:
        """Return those of these digests at which a turn of a session ends, with the session most recently used."""
        sql = """SELECT prefix, session_ends.id FROM session_ends JOIN sessions USING(model, id)
            WHERE model = ? AND prefix IN (SELECT value FROM json_each(?)) ORDER BY used"""
        with self._store_errors():
            return dict(self._database.query(sql, (model, json.dumps(list(prefixes)))))

    def rows(self, model: str | None = None, before: float | None = None) -> list[SessionRow]:
        """Return the sessions, most recently used first.

        Args:
            model: Only those of this tenant's model digest; None: all.
            before: Only those whose last use is before this time (seconds since the epoch).
        """
        sql, arguments = "SELECT model, id, version, used, turns, tokens FROM sessions WHERE 1", list[Any]()
        for clause, value in ((" AND model = ?", model), (" AND used < ?", before)):
            if value is not None:
                sql += clause
                arguments.append(value)
        with self._store_errors():
            return [SessionRow(*row) for row in self._database.query(f"{sql} ORDER BY used DESC", arguments)]

    def count(self, model: str) -> int:
        """Return how many sessions a tenant has."""
        with self._store_errors():
            return int(self._database.query("SELECT count(*) FROM sessions WHERE model = ?", (model,))[0][0])

    def owned(self) -> list[tuple[str, str, str]]:
        """Return (tenant's digest, session, key) of all keys of all sessions, least recently used sessions first."""
        sql = "SELECT model, id, key FROM session_keys JOIN sessions USING(model, id) ORDER BY used, session_keys.rowid"
        with self._store_errors():
            return [(model, id, key) for model, id, key in self._database.query(sql)]

    def in_use(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that belong to at least one session."""
        sql = "SELECT DISTINCT key FROM session_keys WHERE key IN (SELECT value FROM json_each(?))"
        with self._store_errors():
            return [key for (key,) in self._database.query(sql, (json.dumps(list(keys)),))]

    def delete(self, model: str, id: str, before: float = math.inf) -> list[str] | None:
        """Delete a session if its last use is before `before` (seconds since the epoch).

        Returns:
            Its keys that no other session has, or None if no session was deleted.
        """
        overdue = "SELECT 1 FROM sessions WHERE model = ? AND id = ? AND used < ?"
        with self._store_errors(), self._database.write() as transaction:
            if transaction.execute(overdue, (model, id, before)).fetchone() is None:
                return None
            orphans = [key for (key,) in transaction.execute(_ORPHANS, (model, id))]
            self._drop(transaction, model, id)
            return orphans

    def _drop(self, transaction: Connection, model: str, id: str) -> None:
        for table in SESSION_TABLES:
            transaction.execute(f"DELETE FROM {table} WHERE model = ? AND id = ?", (model, id))
