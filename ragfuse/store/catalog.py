"""The catalog of a store: profiles by name, texts of known chunks, and sessions
(`session_catalog.py`).

The texts let a later process find the same chunks in a prompt. They are stored per model digest, so
that a salted tenant has its own, and are as private as the folder.

An answer must not fail because the catalog does, so `Catalog` returns defaults when its file cannot
be read or written. `Catalog.strict`, a `CatalogFile`, raises instead, for callers who ask for the
catalog itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ragfuse.errors import StoreError
from ragfuse.process.shared import note
from ragfuse.settings import SharedWith
from ragfuse.store.breaker import Breaker
from ragfuse.store.database import Database, Queries, T, json_object
from ragfuse.store.folder import open_folder
from ragfuse.store.session_catalog import SESSION_SCHEMA, SessionQueries

COOL_DOWN_S = 10.0
"""Seconds without another try after the file could not be read or written."""
LOCK_WAIT_S = 3.0
"""Most seconds that a query waits for another process that is writing the file."""
_NAME = "catalog.sqlite"
_SCHEMA = f"""{SESSION_SCHEMA}
CREATE TABLE IF NOT EXISTS profiles(name TEXT PRIMARY KEY, profile TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS texts(
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, key TEXT NOT NULL, source TEXT NOT NULL,
    text TEXT NOT NULL,
    UNIQUE(model, key, source)
);
"""
_ADD = """
INSERT INTO texts(model, key, text, source) VALUES (?, ?, ?, ?)
ON CONFLICT(model, key, source) DO UPDATE SET text = excluded.text WHERE text != excluded.text
"""
_TEXTS = "SELECT key, text, source FROM texts WHERE model = ? ORDER BY id LIMIT ?"
_KNOWN = (
    "SELECT count(DISTINCT key) FROM texts WHERE model = ? AND key IN (SELECT value FROM"
    " json_each(?))"
)
_TENANTS = "SELECT model FROM texts UNION SELECT model FROM sessions ORDER BY 1"


class KnownText(NamedTuple):
    """A known chunk: its key as text, its text, and the source of the text."""

    key: str
    text: str
    source: str


class CatalogQueries(Queries):
    """The queries of a catalog; a subclass decides what happens when its file cannot be used."""

    @property
    def sessions(self) -> SessionQueries:
        """The queries of the sessions in this catalog."""
        return SessionQueries(self)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the profile of that name, or None if there is none or it is damaged."""
        for (text,) in self.query("SELECT profile FROM profiles WHERE name = ?", name):
            return json_object(text)
        return None

    def put(self, name: str, profile: Mapping[str, Any]) -> bool:
        """Save a profile of plain JSON types, replacing an earlier one, and return whether it was
        written.
        """
        replace = "INSERT OR REPLACE INTO profiles VALUES (?, ?)"
        return self.change(replace, name, json.dumps(dict(profile))) > 0

    def settle(self, name: str, profile: Mapping[str, Any]) -> dict[str, Any]:
        """Return the profile of that name; if there is none, save `profile` first. Concurrent
        callers get the same.
        """
        self.change("INSERT OR IGNORE INTO profiles VALUES (?, ?)", name, json.dumps(dict(profile)))
        return self.get(name) or dict(profile)

    def delete(self, name: str) -> None:
        """Delete the profile of that name, if there is one."""
        self.change("DELETE FROM profiles WHERE name = ?", name)

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        return self.words("SELECT name FROM profiles ORDER BY name")

    def add_texts(self, model: str, texts: Iterable[tuple[str, str, str]]) -> None:
        """Save (key, text, source) of chunks encoded for the model digest `model`; adding one again
        changes nothing.
        """
        rows = [(model, *text) for text in texts]

        def add(database: Database) -> None:
            with database.write() as transaction:
                transaction.executemany(_ADD, rows)

        self.ask(add, None)

    def texts(self, model: str, n: int = -1) -> list[KnownText]:
        """Return the oldest `n` known texts of a model digest (-1: all), in order; one of two
        sources comes twice.
        """
        rows = self.query(_TEXTS, model, n)
        # else damaged
        return [KnownText(*row) for row in rows if all(isinstance(word, str) for word in row)]

    def knows(self, model: str, keys: Collection[str]) -> bool:
        """Return whether a model digest has a known text for each of these keys."""
        wanted = set(keys)
        return self.number(_KNOWN, model, json.dumps(list(wanted))) == len(wanted)

    def count_texts(self, model: str) -> int:
        """Return how many known texts a model digest has; a text from two sources counts twice."""
        return self.number("SELECT count(*) FROM texts WHERE model = ?", model)

    def tenants(self) -> list[str]:
        """Return the model digests that have known texts or sessions, sorted."""
        return self.words(_TENANTS)

    def delete_texts(
        self,
        model: str | None = None,
        *,
        source: str | None = None,
        keys: Iterable[str] | None = None,
    ) -> int:
        """Delete the texts that match all given arguments (without any: all texts), and return how
        many there were.
        """
        sql, arguments = "DELETE FROM texts WHERE 1", list[str]()
        given = None if keys is None else json.dumps(list(keys))
        for test, value in (
            ("model = ?", model),
            ("source = ?", source),
            ("key IN (SELECT value FROM json_each(?))", given),
        ):
            if value is not None:
                sql += f" AND {test}"
                arguments.append(value)
        return self.change(sql, *arguments)


class CatalogFile(CatalogQueries):
    """The catalog in a store's folder. Threads and processes may share it.

    Every query raises StoreError if the file cannot be read or written: unlike a KV entry, what is
    lost here would not come back by itself. Once it is closed, queries return defaults.

    Args:
        path: The store's folder; None: there is no file, and nothing is kept.
        shared_with: Who else may use the folder.
    """

    def __init__(self, path: str | Path | None, shared_with: SharedWith = "nobody") -> None:
        self._database: Database | None = None
        if path is None:
            return
        self.path = open_folder(Path(path).expanduser(), shared_with)
        self._database = Database(self.path, _NAME, _SCHEMA, LOCK_WAIT_S)

    @property
    def is_open(self) -> bool:
        """Whether there is a file, and it is not closed."""
        return self._database is not None

    def ask(self, query: Callable[[Database], T], default: T) -> T:
        """Return the result of a query; `default` without an open file."""
        if self._database is None:
            return default
        try:
            return query(self._database)
        except StoreError:
            if self._database is None:
                return default  # closed during the query
            raise

    def close(self) -> None:
        """Close the file."""
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def __enter__(self) -> CatalogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Catalog(CatalogQueries):
    """A store's catalog for callers that can do without it. Threads may share it.

    A query returns its default if there is no file, or if the file cannot be read or written. Such
    a failure is counted in `failures`, logged once, and named in the trace of each answer that it
    affects. The file is then not tried again for `COOL_DOWN_S`.

    Args:
        file: The file; None for a store without a disk, whose catalog stays empty.
    """

    def __init__(self, file: CatalogFile | None = None) -> None:
        self.strict, self.failures = file or CatalogFile(None), 0
        self._lock, self._why = threading.Lock(), ""
        self._breaker = Breaker(
            f"The catalog of {file.path}" if file is not None else "", COOL_DOWN_S
        )

    @property
    def file(self) -> CatalogFile | None:
        """The file while it is open."""
        return self.strict if self.strict.is_open else None

    def tried(self, query: Callable[[CatalogQueries], T]) -> tuple[bool, T | None]:
        """Return whether the file could be used, and the result of a query."""
        if not self.strict.is_open:
            return False, None
        if self._breaker.enter():
            try:
                found = query(self.strict)
            except StoreError as error:
                self._breaker.failed("be used", error)
                self._why = f"{self._breaker.name}: {error.__cause__ or error}"
            else:
                self._breaker.succeeded()
                return True, found
        with self._lock:
            self.failures += 1
        note(self._why)
        return False, None

    def ask(self, query: Callable[[Database], T], default: T) -> T:
        """Return the result of a query, or `default` where the file cannot be used."""
        answered, found = self.tried(lambda file: file.ask(query, default))
        return found if answered else default  # type: ignore[return-value]

    def close(self) -> None:
        """Close the file. From now on queries return their defaults, and nothing is saved."""
        self.strict.close()
