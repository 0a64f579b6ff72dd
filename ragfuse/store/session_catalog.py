"""The sessions in a catalog: the state of each as versioned JSON, and its KV keys.

`sessions/session.py` defines what a session is. Here its state is opaque; a write must name the
version it replaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from sqlite3 import Connection
from typing import Any

from ragfuse.store.database import Database, Queries, json_object

SESSION_TABLES = ("sessions", "session_keys")
_GET = "SELECT version, used, state FROM sessions WHERE model = ? AND id = ?"
_ROWS = "SELECT model, id, version, used, turns, tokens FROM sessions ORDER BY used DESC"
_OWNED = (
    "SELECT model, id, key FROM session_keys JOIN sessions USING(model, id) ORDER BY used,"
    " session_keys.rowid"
)
_IN_USE = "SELECT DISTINCT key FROM session_keys WHERE key IN (SELECT value FROM json_each(?))"
_OVERDUE = "SELECT 1 FROM sessions WHERE model = ? AND id = ? AND used < ?"
_KEYS = "SELECT key FROM session_keys WHERE model = ? AND id = ?"
SESSION_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions(
    model TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, used REAL NOT NULL,
    turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL, state TEXT NOT NULL, PRIMARY KEY(model, id)
);
CREATE INDEX IF NOT EXISTS sessions_by_use ON sessions(used);
CREATE TABLE IF NOT EXISTS session_keys(
    key TEXT NOT NULL, model TEXT NOT NULL, id TEXT NOT NULL, PRIMARY KEY(key, model, id)
);
CREATE INDEX IF NOT EXISTS session_keys_of ON session_keys(model, id);
"""


@dataclass(frozen=True)
class SessionInfo:
    """A summary of a session.

    Args:
        model: The digest of its model and tenant.
        id: Its name.
        version: Number of the version in the catalog; 0: none.
        used: When it was last used, in seconds since the epoch.
        turns: Number of turns.
        tokens: Number of tokens.
        persistent: Whether it belongs into the catalog.
    """

    model: str
    id: str
    version: int
    used: float
    turns: int
    tokens: int
    persistent: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return the summary in plain JSON types."""
        return asdict(self)


class SessionQueries:
    """Queries about the sessions in a catalog. Threads and processes may share them.

    Args:
        catalog: Runs the queries.
    """

    def __init__(self, catalog: Queries) -> None:
        self._catalog = catalog

    def get(self, model: str, id: str) -> tuple[int, float, dict[str, Any]] | None:
        """Return version, last use and state of a session, or None if there is none or its state is
        damaged.
        """
        for version, used, text in self._catalog.query(_GET, model, id):
            if (state := json_object(text)) is not None:
                return version, used, state
        return None

    def put(self, row: SessionInfo, state: Mapping[str, Any], keys: Iterable[str]) -> bool | None:
        """Save a session, replacing version `row.version` of it (0: there is none yet).

        A session whose last use lies after `row.used`, which is now, gets now as its last use: a
            clock ran ahead.

        Args:
            row: The session.
            state: Its state, plain JSON types.
            keys: Keys of its KV.

        Returns:
            True if it was written, False if another writer replaced that version first, None if the
            catalog has no file or cannot use it.
        """
        who = (row.model, row.id)
        values = (*who, row.version + 1, row.used, row.turns, row.tokens, json.dumps(dict(state)))

        def write(database: Database) -> bool | None:
            with database.write() as transaction:
                stored = transaction.execute(_GET, who).fetchone()
                if (stored[0] if stored else 0) != row.version:
                    return False
                _drop(transaction, *who)
                transaction.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", values)
                transaction.execute("UPDATE sessions SET used = ?1 WHERE used > ?1", (row.used,))
                transaction.executemany(
                    "INSERT OR IGNORE INTO session_keys(key, model, id) VALUES (?, ?, ?)",
                    [(name, *who) for name in dict.fromkeys(keys)],
                )
            return True

        return self._catalog.ask(write, None)

    def rows(self) -> list[SessionInfo]:
        """Return all sessions, most recently used first."""
        return [SessionInfo(*row) for row in self._catalog.query(_ROWS)]

    def count(self, model: str) -> int:
        """Return how many sessions a tenant has."""
        return self._catalog.number("SELECT count(*) FROM sessions WHERE model = ?", model)

    def owned(self) -> list[tuple[str, str, str]]:
        """Return (tenant's digest, session, key) of all keys of all sessions, least recently used
        sessions first.
        """
        return [(model, id, key) for model, id, key in self._catalog.query(_OWNED)]

    def in_use(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that belong to at least one session."""
        return self._catalog.words(_IN_USE, json.dumps(list(keys)))

    def delete(self, model: str, id: str, before: float = inf) -> list[str] | None:
        """Delete a session if its last use is before `before` (seconds since the epoch).

        Returns:
            Its keys, or None if no session was deleted.
        """

        def remove(database: Database) -> list[str] | None:
            with database.write() as transaction:
                if transaction.execute(_OVERDUE, (model, id, before)).fetchone() is None:
                    return None
                keys = [key for (key,) in transaction.execute(_KEYS, (model, id))]
                _drop(transaction, model, id)
                return keys

        return self._catalog.ask(remove, None)


def _drop(transaction: Connection, model: str, id: str) -> None:
    for table in SESSION_TABLES:
        transaction.execute(f"DELETE FROM {table} WHERE model = ? AND id = ?", (model, id))
