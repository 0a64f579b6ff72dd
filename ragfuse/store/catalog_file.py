"""The file of a store's catalog: profiles by name, texts of known chunks, and sessions (`session_catalog.py`).

The texts let a later process find the same chunks in a prompt. They are stored per model digest, so that a salted
tenant has its own, and are as private as the folder.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ragfuse.settings import SharedWith
from ragfuse.store.database import Database, Row
from ragfuse.store.folder import describe_error, locked, open_folder, refusal
from ragfuse.store.session_catalog import SESSION_SCHEMA, SessionCatalog
from ragfuse.types.keys import FORMAT_VERSION

_SCHEMA = f"""{SESSION_SCHEMA}
CREATE TABLE IF NOT EXISTS profiles(name TEXT PRIMARY KEY, profile TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS texts(
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, key TEXT NOT NULL, source TEXT NOT NULL, text TEXT NOT NULL,
    UNIQUE(model, key, source)
);
"""
_ADD = """
INSERT INTO texts(model, key, text, source) VALUES (?, ?, ?, ?)
ON CONFLICT(model, key, source) DO UPDATE SET text = excluded.text WHERE text != excluded.text
"""
LOCK_WAIT_S = 3.0
"""Most seconds that a query waits for another process that is writing the file."""
_PAGE = "SELECT id, key, text, source FROM texts WHERE model = ? AND id > ? ORDER BY id LIMIT 1000"


class KnownText(NamedTuple):
    """A known chunk: its key as text, its text, and the source of the text."""

    key: str
    text: str
    source: str


class CatalogFile:
    """The catalog in a store's folder. Threads and processes may share it.

    Every method raises StoreError if the file cannot be read or written: unlike a KV entry, what is lost here would
    not come back by itself.

    Args:
        path: The store's folder.
        shared_with: Who else may use the folder.
    """

    def __init__(self, path: str | Path, shared_with: SharedWith = "nobody") -> None:
        self.path = open_folder(Path(path).expanduser(), shared_with)
        with self._store_errors(), locked(self.path / "lock"):
            self._database = Database(self.path / "catalog.sqlite", _SCHEMA, FORMAT_VERSION, LOCK_WAIT_S)
        self.sessions = SessionCatalog(self._database, self._store_errors)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the profile of that name, or None if there is none or it is damaged."""
        with self._store_errors():
            rows = self._database.query("SELECT profile FROM profiles WHERE name = ?", (name,))
        return _parsed(rows[0][0]) if rows else None

    def put(self, name: str, profile: Mapping[str, Any]) -> None:
        """Save a profile of plain JSON types, replacing an earlier one."""
        text = json.dumps(dict(profile))
        with self._store_errors(), self._database.write() as transaction:
            transaction.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?)", (name, text))

    def delete(self, name: str) -> None:
        """Delete the profile of that name, if there is one."""
        with self._store_errors(), self._database.write() as transaction:
            transaction.execute("DELETE FROM profiles WHERE name = ?", (name,))

    def settle(self, name: str, profile: Mapping[str, Any]) -> dict[str, Any]:
        """Return the profile of that name; if there is none, save `profile` first. Concurrent callers get the same."""
        with self._store_errors(), self._database.write() as transaction:
            row = transaction.execute("SELECT profile FROM profiles WHERE name = ?", (name,)).fetchone()
            found = _parsed(row[0]) if row else None
            if found is None:
                transaction.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?)", (name, json.dumps(dict(profile))))
        return dict(profile) if found is None else found

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        with self._store_errors():
            return _words(self._database.query("SELECT name FROM profiles ORDER BY name"))

    def add_texts(self, model: str, texts: Iterable[tuple[str, str, str]]) -> None:
        """Save (key, text, source) of chunks encoded for the model digest `model`; adding one again changes nothing."""
        rows = [(model, *text) for text in texts]
        with self._store_errors(), self._database.write() as transaction:
            transaction.executemany(_ADD, rows)

    def texts(self, model: str) -> Iterator[KnownText]:
        """Yield all known texts of `model`, oldest first; a text from two sources comes twice.

        Others may write between two texts: the rows are read page by page.
        """
        last = 0
        while True:
            with self._store_errors():
                page = self._database.query(_PAGE, (model, last))
            if not page:
                return
            for last, key, text, source in page:  # noqa: B007 - the last id begins the next page
                if all(isinstance(word, str) for word in (key, text, source)):  # skip a damaged row only
                    yield KnownText(key, text, source)

    def knows(self, model: str, keys: Collection[str]) -> bool:
        """Return whether `model` has a known text for each of these keys."""
        sql = "SELECT count(DISTINCT key) FROM texts WHERE model = ? AND key IN (SELECT value FROM json_each(?))"
        wanted = set(keys)
        with self._store_errors():
            return int(self._database.query(sql, (model, json.dumps(sorted(wanted))))[0][0]) == len(wanted)

    def count_texts(self, model: str) -> int:
        """Return how many known texts `model` has; a text from two sources counts twice."""
        with self._store_errors():
            return int(self._database.query("SELECT count(*) FROM texts WHERE model = ?", (model,))[0][0])

    def oldest_texts(self, model: str, n: int) -> list[KnownText]:
        """Return the `n` texts of `model` that were added first, oldest first."""
        sql = "SELECT key, text, source FROM texts WHERE model = ? ORDER BY id LIMIT ?"
        with self._store_errors():
            rows = self._database.query(sql, (model, n))
        return [KnownText(*row) for row in rows if all(isinstance(word, str) for word in row)]

    def models(self) -> list[str]:
        """Return the model digests that have known texts, sorted."""
        with self._store_errors():
            return _words(self._database.query("SELECT DISTINCT model FROM texts ORDER BY model"))

    def tenants(self) -> list[str]:
        """Return the model digests that have known texts or sessions, sorted."""
        sql = "SELECT model FROM texts UNION SELECT model FROM sessions ORDER BY 1"
        with self._store_errors():
            return _words(self._database.query(sql))

    def delete_texts(
        self, model: str | None = None, *, source: str | None = None, keys: Iterable[str] | None = None
    ) -> int:
        """Delete the texts that match all given arguments (without any: all texts), and return how many there were."""
        sql, arguments = "DELETE FROM texts WHERE 1", []
        for column, value in (("model", model), ("source", source)):
            if value is not None:
                sql += f" AND {column} = ?"
                arguments.append(value)
        if keys is not None:
            sql += " AND key IN (SELECT value FROM json_each(?))"
            arguments.append(json.dumps(list(keys)))
        with self._store_errors(), self._database.write() as transaction:
            return transaction.execute(sql, arguments).rowcount

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> CatalogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise refusal(self.path, describe_error(self.path, error, " in catalog.sqlite")) from error


def _parsed(text: str | bytes) -> dict[str, Any] | None:
    try:
        profile = json.loads(text)
    except ValueError:
        return None
    return profile if isinstance(profile, dict) else None


def _words(rows: Iterable[Row]) -> list[str]:
    return [word for (word,) in rows if isinstance(word, str)]
