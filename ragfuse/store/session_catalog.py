"""Sessions as the catalog keeps them: each as JSON under its tenant and name, its keys, and what its turns end with.

`sessions/session.py` says what a session is; here it is a text with a version, which one writer at a time replaces.
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
    model TEXT NOT NULL, heard TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY(model, heard, id)
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
    """A session without what it says: tenant's digest, name, version, when it was used last, turns, tokens."""

    model: str
    id: str
    version: int
    used: float
    turns: int
    tokens: int


class SessionCatalog:
    """The sessions of a catalog. Threads and processes may share it; StoreError where it cannot be read or written."""

    def __init__(self, database: Database, trouble: Callable[[], AbstractContextManager[None]]) -> None:
        self._database, self._trouble = database, trouble

    def get(self, model: str, id: str) -> tuple[int, float, dict[str, Any]] | None:
        """Version of a session, when it was used last, and its state; None where there is none, or a bad byte has
        made it none."""
        sql = "SELECT version, used, state FROM sessions WHERE model = ? AND id = ?"
        with self._trouble():
            rows = self._database.query(sql, (model, id))
        try:
            state = json.loads(rows[0][2]) if rows else None
        except ValueError:
            return None
        return (*rows[0][:2], state) if isinstance(state, dict) else None

    def put(
        self,
        line: SessionRow,
        state: Mapping[str, Any],
        ends: Iterable[str],
        keys: Iterable[str],
    ) -> bool:
        """Write a session in place of its `line.version` (0: there is none yet); False, and nothing changed, if
        another writer was first. Those last used beyond `line.used`, which is now, were used now."""
        who = (line.model, line.id)
        with self._trouble(), self._database.write() as transaction:
            row = transaction.execute("SELECT version FROM sessions WHERE model = ? AND id = ?", who).fetchone()
            if (row[0] if row else 0) != line.version:
                return False
            self._drop(transaction, *who)
            told = (*who, line.version + 1, line.used, line.turns, line.tokens, json.dumps(dict(state)))
            transaction.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", told)
            transaction.execute("UPDATE sessions SET used = ?1 WHERE used > ?1", (line.used,))
            for table, names in (("session_ends(heard, model, id)", ends), ("session_keys(key, model, id)", keys)):
                rows = [(name, *who) for name in dict.fromkeys(names)]
                transaction.executemany(f"INSERT OR IGNORE INTO {table} VALUES (?, ?, ?)", rows)
        return True

    def ending(self, model: str, heard: Sequence[str]) -> dict[str, str]:
        """Of these digests of messages, those that a session's turn ends with, and the one that was used last."""
        sql = """SELECT heard, session_ends.id FROM session_ends JOIN sessions USING(model, id)
            WHERE model = ? AND heard IN (SELECT value FROM json_each(?)) ORDER BY used"""
        with self._trouble():
            return dict(self._database.query(sql, (model, json.dumps(list(heard)))))

    def lines(self, model: str | None = None, before: float | None = None) -> list[SessionRow]:
        """Sessions of a tenant, or of all, used last first; before: only those last used before that time."""
        sql, arguments = "SELECT model, id, version, used, turns, tokens FROM sessions WHERE 1", list[Any]()
        for clause, value in ((" AND model = ?", model), (" AND used < ?", before)):
            if value is not None:
                sql += clause
                arguments.append(value)
        with self._trouble():
            return [SessionRow(*row) for row in self._database.query(f"{sql} ORDER BY used DESC", arguments)]

    def count(self, model: str) -> int:
        """How many sessions a tenant has."""
        with self._trouble():
            return int(self._database.query("SELECT count(*) FROM sessions WHERE model = ?", (model,))[0][0])

    def owned(self) -> list[tuple[str, str, str]]:
        """Of every key of a session: tenant's digest, session's name, key; in the order in which sessions were used."""
        sql = "SELECT model, id, key FROM session_keys JOIN sessions USING(model, id) ORDER BY used, session_keys.rowid"
        with self._trouble():
            return [(model, id, key) for model, id, key in self._database.query(sql)]

    def having(self, keys: Sequence[str]) -> list[str]:
        """Those of these keys that some session has."""
        sql = "SELECT DISTINCT key FROM session_keys WHERE key IN (SELECT value FROM json_each(?))"
        with self._trouble():
            return [key for (key,) in self._database.query(sql, (json.dumps(list(keys)),))]

    def delete(self, model: str, id: str, before: float = math.inf) -> list[str] | None:
        """Forget a session that was used last before that time; keys that no other one has, None where there was
        none."""
        overdue = "SELECT 1 FROM sessions WHERE model = ? AND id = ? AND used < ?"
        with self._trouble(), self._database.write() as transaction:
            if transaction.execute(overdue, (model, id, before)).fetchone() is None:
                return None
            orphans = [key for (key,) in transaction.execute(_ORPHANS, (model, id))]
            self._drop(transaction, model, id)
            return orphans

    def _drop(self, transaction: Connection, model: str, id: str) -> None:
        for table in SESSION_TABLES:
            transaction.execute(f"DELETE FROM {table} WHERE model = ? AND id = ?", (model, id))
