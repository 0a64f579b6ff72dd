"""The catalog of a store: profiles, texts of known chunks and sessions. `catalog_file.py` keeps it on disk.

An answer must not fail because the catalog does, so `Catalog` returns defaults when its file cannot be read or written.
`Catalog.strict` raises instead, for callers who ask for the catalog itself.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from ragfuse.errors import StoreError
from ragfuse.process.shared import note
from ragfuse.store.breaker import Breaker
from ragfuse.store.catalog_file import CatalogFile, KnownText
from ragfuse.store.session_catalog import SessionCatalog, SessionRow

T = TypeVar("T")

COOL_DOWN_S = 10.0
"""Seconds without another try after the file could not be read or written."""


class CatalogQueries(ABC):
    """The queries of a catalog; a subclass decides what happens when its file cannot be used."""

    @abstractmethod
    def _ask(self, query: Callable[[CatalogFile], T], default: T) -> T:
        """Return the result of `query`, run on the file, or `default`."""

    @property
    def sessions(self) -> SessionQueries:
        """The queries of the sessions in this catalog."""
        return SessionQueries(lambda query, default: self._ask(lambda file: query(file.sessions), default))

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the profile of that name, or None if there is none."""
        return self._ask(lambda file: file.get(name), None)

    def put(self, name: str, profile: Mapping[str, Any]) -> bool:
        """Save a profile of plain JSON types, replacing an earlier one, and return whether it was written."""

        def write(file: CatalogFile) -> bool:
            file.put(name, profile)
            return True

        return self._ask(write, False)

    def settle(self, name: str, profile: Mapping[str, Any]) -> dict[str, Any]:
        """Return the profile of that name; if there is none, save `profile` under it first."""
        return self._ask(lambda file: file.settle(name, profile), dict(profile))

    def delete(self, name: str) -> None:
        """Delete the profile of that name, if there is one."""
        self._ask(lambda file: file.delete(name), None)

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        return self._ask(lambda file: file.names(), [])

    def add_texts(self, model: str, texts: Iterable[tuple[str, str, str]]) -> None:
        """Save (key, text, source) of chunks that were encoded for the model digest `model`."""
        self._ask(lambda file: file.add_texts(model, texts), None)

    def texts(self, model: str) -> list[KnownText]:
        """Return all known texts of a model digest, oldest first."""
        return self._ask(lambda file: list(file.texts(model)), [])

    def knows(self, model: str, keys: Collection[str]) -> bool:
        """Return whether a model digest has a known text for each of these keys."""
        return self._ask(lambda file: file.knows(model, keys), False)

    def count_texts(self, model: str) -> int:
        """Return how many known texts a model digest has; a text from two sources counts twice."""
        return self._ask(lambda file: file.count_texts(model), 0)

    def oldest_texts(self, model: str, n: int) -> list[KnownText]:
        """Return the `n` texts of a model digest that were added first, oldest first."""
        return self._ask(lambda file: file.oldest_texts(model, n), [])

    def models(self) -> list[str]:
        """Return the model digests that have known texts, sorted."""
        return self._ask(lambda file: file.models(), [])

    def tenants(self) -> list[str]:
        """Return the model digests that have known texts or sessions, sorted."""
        return self._ask(lambda file: file.tenants(), [])

    def delete_texts(
        self, model: str | None = None, *, source: str | None = None, keys: Iterable[str] | None = None
    ) -> int:
        """Delete the texts that match all given arguments (without any: all texts), and return how many there were."""
        return self._ask(lambda file: file.delete_texts(model, source=source, keys=keys), 0)


class SessionQueries:
    """Queries about the sessions in a catalog.

    Args:
        ask: Called with a query and a default; runs the query, and returns the default if the catalog's file cannot be
            used.
    """

    def __init__(self, ask: Callable[[Callable[[SessionCatalog], Any], Any], Any]) -> None:
        self._ask = ask

    def get(self, model: str, id: str) -> tuple[int, float, dict[str, Any]] | None:
        """Return version, last use (seconds since 1970) and state of a session, or None if there is none."""
        found: tuple[int, float, dict[str, Any]] | None = self._ask(lambda sessions: sessions.get(model, id), None)
        return found

    def put(self, row: SessionRow, state: Mapping[str, Any], ends: Iterable[str], keys: Iterable[str]) -> bool | None:
        """Save a session, replacing version `row.version` of it (see `SessionCatalog.put`).

        Returns:
            True if it was written, False if another writer replaced that version first, None if the catalog has no file
            or cannot use it.
        """
        is_written: bool | None = self._ask(lambda sessions: sessions.put(row, state, ends, keys), None)
        return is_written

    def ending(self, model: str, prefixes: Sequence[str]) -> dict[str, str]:
        """Find the sessions that a conversation may continue.

        Args:
            model: The tenant's model digest.
            prefixes: For each message of the conversation, a digest of all messages up to it.

        Returns:
            Those digests at which a turn of a stored session ends, each with the name of the session (of several, the
            most recently used).
        """
        found: dict[str, str] = self._ask(lambda sessions: sessions.ending(model, prefixes), {})
        return found

    def rows(self) -> list[SessionRow]:
        """Return all sessions, most recently used first."""
        found: list[SessionRow] = self._ask(lambda sessions: sessions.rows(), [])
        return found

    def count(self, model: str) -> int:
        """Return how many sessions a tenant has."""
        return int(self._ask(lambda sessions: sessions.count(model), 0))

    def owned(self) -> list[tuple[str, str, str]]:
        """Return (tenant's digest, session, key) of all keys of all sessions, least recently used sessions first."""
        found: list[tuple[str, str, str]] = self._ask(lambda sessions: sessions.owned(), [])
        return found

    def in_use(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that belong to at least one session."""
        found: list[str] = self._ask(lambda sessions: sessions.in_use(keys), [])
        return found

    def delete(self, model: str, id: str, before: float = inf) -> list[str] | None:
        """Delete a session if its last use is before `before` (seconds since 1970).

        Returns:
            Its keys that no other session has, or None if no session was deleted.
        """
        orphans: list[str] | None = self._ask(lambda sessions: sessions.delete(model, id, before), None)
        return orphans


class Catalog(CatalogQueries):
    """A store's catalog for callers that can do without it. Threads may share it.

    A query returns its default if there is no file, or if the file cannot be read or written. Such a failure is counted
    in `failures`, logged once, and named in the trace of each answer that it affects. The file is then not tried again
    for `COOL_DOWN_S`.

    Args:
        file: The file; None for a store without a disk, whose catalog stays empty.
    """

    def __init__(self, file: CatalogFile | None = None) -> None:
        self.file, self.failures = file, 0
        self._lock, self._why = threading.Lock(), ""
        name = f"The catalog of {file.path}" if file is not None else ""
        self._breaker = Breaker(name, COOL_DOWN_S)
        self.strict = StrictCatalog(self)

    def try_get(self, name: str) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the file could be used, and the profile of that name."""
        return self._try(lambda file: file.get(name))

    def try_texts(self, model: str) -> tuple[bool, list[KnownText] | None]:
        """Return whether the file could be used, and the known texts of a model digest."""
        return self._try(lambda file: list(file.texts(model)))

    def try_session(self, model: str, id: str) -> tuple[bool, tuple[int, float, dict[str, Any]] | None]:
        """Return whether the file could be used, and version, last use and state of a session."""
        return self._try(lambda file: file.sessions.get(model, id))

    def close(self) -> None:
        """Close the file. From now on queries return their defaults, and nothing is saved."""
        file, self.file = self.file, None
        if file is not None:
            file.close()

    def _ask(self, query: Callable[[CatalogFile], T], default: T) -> T:
        answered, found = self._try(query)
        return found if answered else default  # type: ignore[return-value]

    def _try(self, query: Callable[[CatalogFile], T]) -> tuple[bool, T | None]:
        file = self.file
        if file is None:
            return False, None
        if self._breaker.enter():
            try:
                found = query(file)
            except StoreError as error:
                if self.file is not file:
                    return False, None  # closed during the query
                self._breaker.failed("be used", error)
                self._why = f"{self._breaker.name}: {error.__cause__ or error}"
            else:
                self._breaker.succeeded()
                return True, found
        with self._lock:
            self.failures += 1
        note(self._why)
        return False, None


class StrictCatalog(CatalogQueries):
    """The same catalog, raising StoreError when its file cannot be read or written."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def _ask(self, query: Callable[[CatalogFile], T], default: T) -> T:
        file = self._catalog.file
        if file is None:
            return default
        try:
            return query(file)
        except StoreError:
            if self._catalog.file is file:
                raise
            return default  # closed during the query
