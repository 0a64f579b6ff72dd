"""The catalog of a store: records by name, texts of known chunks, and sessions.

The texts let a later process find the same chunks in a prompt. Texts are stored per model digest,
which includes the tenant's salt, so tenants share no texts. The catalog does not interpret the
state of a session. Each save of a session names the version that the save replaces. A failure of
the catalog must not fail an answer, so queries return defaults if the file is unusable. Queries of
`Catalog.strict` raise StoreError instead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from sqlite3 import Connection
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from ragfuse.errors import StoreError
from ragfuse.process.shared import note
from ragfuse.settings import Settings
from ragfuse.store.database import Database, Row, T
from ragfuse.store.folder import open_folder
from ragfuse.store.tier import Breaker
from ragfuse.types.keys import digest as digest_of

LOCK_WAIT_S = 3.0
"""Maximum seconds that a query waits for another process's write."""
_NAME = "catalog.sqlite"
_SCHEMA = """
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
_AMONG = "key IN (SELECT value FROM json_each(?))"
_TENANTS = "SELECT model FROM texts UNION SELECT model FROM sessions ORDER BY 1"
_SESSION = "SELECT version, used, state FROM sessions WHERE model = ? AND id = ?"
_SESSIONS = "SELECT model, id, version, used, turns, tokens FROM sessions ORDER BY used DESC"
_OWNED = (
    "SELECT model, id, key FROM session_keys JOIN sessions USING(model, id) ORDER BY used,"
    " session_keys.rowid"
)
_OVERDUE = "SELECT 1 FROM sessions WHERE model = ? AND id = ? AND used < ?"
_KEYS = "SELECT key FROM session_keys WHERE model = ? AND id = ?"


class KnownText(NamedTuple):
    """The text of a known chunk, its `ChunkKey` as a string, and its source, such as a document."""

    key: str
    text: str
    source: str


@dataclass(frozen=True)
class SessionInfo:
    """A summary of a session.

    Args:
        model: The digest of the session's model and tenant.
        id: The name of the session.
        version: Number of the latest saved version; 0 if the session was never saved.
        used: Time of the latest use, in seconds since the epoch.
        turns: Number of turns.
        tokens: Number of tokens.
        persistent: True if the catalog has the session; False if only this process has it.
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


class Catalog:
    """A store's catalog. Safe for threads and processes.

    A query returns a default if there is no file, or if the file cannot be read or written. A
    failed query is counted in `failures` and reported in the trace of the affected answer. The
    first failure is logged. After a failure, `Breaker` keeps the file unused for some seconds.

    Args:
        path: The store's folder. If None, there is no file and nothing is saved.

    Attributes:
        strict: The same catalog, except that a failed query raises StoreError. Callers use `strict`
            for records that must not be lost, because a record, unlike KV, cannot be recomputed.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path: Path | None = None
        self._database: Database | None = None
        if path is not None:
            self.path = open_folder(Path(path).expanduser())
            self._database = Database(self.path, _NAME, _SCHEMA, LOCK_WAIT_S)
        self.strict = copy(self)
        self.strict.strict = self.strict
        self.failures, self._lock, self._why = 0, threading.Lock(), ""
        self._breaker = Breaker(f"The catalog of {self.path}")

    @property
    def is_open(self) -> bool:
        """True if the catalog has an open file."""
        return self._database is not None and self._database.is_open

    def tried(self, query: Callable[[Catalog], T]) -> tuple[bool, T | None]:
        """Return (True, query(self.strict)), or (False, None) if the query fails or is skipped."""
        if not self.is_open:
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
        """Return a query's result, or `default` if the query fails. `strict` raises StoreError."""
        if self is not self.strict:
            answered, found = self.tried(lambda strict: strict.ask(query, default))
            return found if answered else default  # type: ignore[return-value]
        try:
            return query(self._database) if self._database and self.is_open else default
        except StoreError:
            if self.is_open:
                raise
            return default  # closed during the query

    def close(self) -> None:
        """Close the file. Later queries return their defaults, and later writes are ignored."""
        if self._database is not None:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # records

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return the record called `name`; None if missing, damaged, or not of type `kind`."""
        for (text,) in self._query("SELECT profile FROM profiles WHERE name = ?", name):
            with suppress(ValueError):
                reader = _adapter(kind)  # type: ignore[arg-type]  # classes can be hashed
                found: T = reader.validate_python(json.loads(text))
                return found
        return None

    def put(self, name: str, record: Any, replaces: bool = True) -> bool:
        """Save a record, unless `replaces` is False and `name` exists. Return True if written."""
        kind: Any = type(record)
        text = json.dumps(_adapter(kind).dump_python(record))
        way = "REPLACE" if replaces else "IGNORE"
        return self._change(f"INSERT OR {way} INTO profiles VALUES (?, ?)", name, text) > 0

    def delete(self, name: str) -> None:
        """Delete the record called `name`, if it exists."""
        self._change("DELETE FROM profiles WHERE name = ?", name)

    def names(self, prefix: str = "") -> list[str]:
        """Return the record names that begin with `prefix`, sorted and without the prefix."""
        found = self._words("SELECT name FROM profiles ORDER BY name")
        return [name.removeprefix(prefix) for name in found if name.startswith(prefix)]

    # texts

    def add_texts(self, model: str, texts: Iterable[tuple[str, str, str]]) -> None:
        """Save (key, text, source) of chunks; replace stored texts of the same key and source."""
        rows = [(model, *text) for text in texts]

        def add(database: Database) -> None:
            with database.write() as transaction:
                transaction.executemany(_ADD, rows)

        self.ask(add, None)

    def texts(self, model: str, n: int = -1) -> list[KnownText]:
        """Return the `n` oldest texts of a model digest, one per text and source; -1 means all."""
        rows = self._query(_TEXTS, model, n)
        # skips damaged rows
        return [KnownText(*row) for row in rows if all(isinstance(word, str) for word in row)]

    def count_texts(self, model: str) -> int:
        """Count the texts of a model digest. A text with two sources is counted twice."""
        return self._number("SELECT count(*) FROM texts WHERE model = ?", model)

    def tenants(self) -> list[str]:
        """Return the sorted model digests that have known texts or sessions."""
        return self._words(_TENANTS)

    def delete_texts(
        self,
        model: str | None = None,
        *,
        source: str | None = None,
        keys: Iterable[str] | None = None,
    ) -> int:
        """Delete the texts that match all given arguments; return the number deleted."""
        given = None if keys is None else json.dumps(list(keys))
        tests = {"model = ?": model, "source = ?": source, _AMONG: given}
        used = {test: value for test, value in tests.items() if value is not None}
        return self._change(" AND ".join(("DELETE FROM texts WHERE 1", *used)), *used.values())

    # sessions

    def session(self, model: str, id: str) -> tuple[int, float, dict[str, Any]] | None:
        """Return (version, time of last use, state) of a session; None if missing or damaged."""
        for version, used, text in self._query(_SESSION, model, id):
            with suppress(ValueError):
                return version, used, _adapter(dict).validate_python(json.loads(text))
        return None

    def put_session(
        self, row: SessionInfo, state: Mapping[str, Any], keys: Iterable[str]
    ) -> bool | None:
        """Save a session: summary `row`, `state` in plain JSON types, and `keys` of stored KV.

        The save replaces the version `row.version` by the next version; 0 means a new session.
        Return False if another writer has changed the stored version. Return None if the file is
        missing or unusable.
        """
        who = (row.model, row.id)
        values = (*who, row.version + 1, row.used, row.turns, row.tokens, json.dumps(dict(state)))

        def write(database: Database) -> bool | None:
            with database.write() as transaction:
                stored = transaction.execute(_SESSION, who).fetchone()
                if (stored[0] if stored else 0) != row.version:
                    return False
                _drop(transaction, who)
                transaction.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", values)
                transaction.executemany(
                    "INSERT OR IGNORE INTO session_keys(key, model, id) VALUES (?, ?, ?)",
                    [(name, *who) for name in dict.fromkeys(keys)],
                )
            return True

        return self.ask(write, None)

    def sessions(self) -> list[SessionInfo]:
        """Return all sessions, most recently used first."""
        return [SessionInfo(*row) for row in self._query(_SESSIONS)]

    def count_sessions(self, model: str) -> int:
        """Return the number of sessions of a model digest."""
        return self._number("SELECT count(*) FROM sessions WHERE model = ?", model)

    def owned(self) -> list[Row]:
        """Return (model digest, session id, key) per KV key, least recently used session first."""
        return self._query(_OWNED)

    def in_use(self, keys: Sequence[str]) -> list[str]:
        """Return the members of `keys` that belong to a session, or are protected."""
        return self._words(
            f"SELECT DISTINCT key FROM session_keys WHERE {_AMONG}", json.dumps(keys)
        )

    def protect(self, key: str) -> None:
        """Keep the KV of a key when a session that uses the key is deleted."""
        self._change("INSERT OR IGNORE INTO session_keys(key, model, id) VALUES (?, '', '')", key)

    def delete_session(self, model: str, id: str, before: float = inf) -> list[str] | None:
        """Delete a session if it was last used before the time `before`. Return the keys of the
        session's KV, or None if no session was deleted.
        """

        def remove(database: Database) -> list[str] | None:
            with database.write() as transaction:
                if transaction.execute(_OVERDUE, (model, id, before)).fetchone() is None:
                    return None
                keys = [key for (key,) in transaction.execute(_KEYS, (model, id))]
                _drop(transaction, (model, id))
                return keys

        return self.ask(remove, None)

    # internal

    def _query(self, sql: str, *arguments: Any) -> list[Row]:
        return self.ask(lambda database: database.query(sql, arguments), [])

    def _number(self, sql: str, *arguments: Any) -> int:
        return sum(number for (number,) in self._query(sql, *arguments))

    def _words(self, sql: str, *arguments: Any) -> list[str]:
        """Return the only column of a query as strings; skip damaged rows."""
        return [word for (word,) in self._query(sql, *arguments) if isinstance(word, str)]

    def _change(self, sql: str, *arguments: Any) -> int:
        return self.ask(lambda database: database.change(sql, arguments), 0)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _drop(transaction: Connection, session: tuple[str, str]) -> None:
    for table in ("sessions", "session_keys"):
        transaction.execute(f"DELETE FROM {table} WHERE model = ? AND id = ?", session)


_PREFIX = "tenant-"
"""Prefix of the names of tenant records in the catalog."""
NAME_CHARS = 8
"""Number of characters of a tenant's name, which is the beginning of the salt's digest."""


def remember_tenant(catalog: Catalog, digest: str, settings: Settings) -> None:
    """Save the model name and the tenant of a model digest, so that lists can show both."""
    catalog.put(_PREFIX + digest, Tenant(digest, settings.model, hidden(settings.salt)))


def hidden(salt: str) -> str:
    """Return a salt's digest, which is safe to save and show; "" for no salt."""
    return digest_of("tenant", salt) if salt else ""


def tenant_name(salt: str) -> str:
    """Return the tenant name that lists and logs show for a salt; "" for no salt."""
    return hidden(salt)[:NAME_CHARS]


class Tenants(dict[str, "Tenant"]):
    """Tenants by model digest. A missing digest gives a `Tenant` whose model is unknown."""

    def __missing__(self, digest: str) -> Tenant:
        return Tenant(digest)


def tenants_in(catalog: Catalog) -> Tenants:
    """Return the tenants that `remember_tenant` saved in a catalog."""
    saved = {digest: catalog.get(_PREFIX + digest, Tenant) for digest in catalog.names(_PREFIX)}
    return Tenants({digest: tenant for digest, tenant in saved.items() if tenant is not None})


@dataclass(frozen=True)
class Tenant:
    """The tenant that a model digest belongs to. `model` is the name of the model, "" if unknown.
    `tenant` is the digest of the tenant's salt, "" if there is no salt.
    """

    digest: str
    model: str = ""
    tenant: str = ""

    @property
    def name(self) -> str:
        """Model and tenant, for display. An unknown model is shown as 8 digits of the digest."""
        return (self.model or self.digest[:8]) + (
            f" (tenant {self.tenant[:NAME_CHARS]})" if self.tenant else ""
        )

    def is_of(self, salt: str) -> bool:
        """Return True if the model is known and the tenant's salt is `salt`; "" means no salt."""
        return bool(self.model) and self.tenant == hidden(salt)

    def is_named(self, name: str) -> bool:
        """Return whether the digest of this tenant's salt begins with `name` (8 or more digits)."""
        return len(name) >= NAME_CHARS and self.tenant.startswith(name)
