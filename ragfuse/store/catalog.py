"""What a store remembers beside its KV: profiles, texts of known chunks, sessions. `catalog_file.py` keeps it on disk.

An answer is worth more than a note of it: `Catalog` goes on without the file where that cannot be read or written, and
`Catalog.strict` raises, for what somebody asked the catalog for by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from ragfuse.errors import StoreError
from ragfuse.process.fork import ForkLock, at_fork
from ragfuse.process.shared import note
from ragfuse.store.breaker import Breaker, BreakerOpen
from ragfuse.store.catalog_file import CatalogFile, KnownText
from ragfuse.store.session_catalog import SessionCatalog, SessionRow

T = TypeVar("T")

COOL_DOWN_S = 10.0
"""Seconds for which a file that could not be read or written is left alone."""
LOCK_WAIT_S = 3.0
"""Seconds that an answer waits, at most, for another process that is writing the file."""


class CatalogQueries:
    """The queries of a catalog; a subclass decides what happens where its file does not answer."""

    def _ask(self, query: Callable[[CatalogFile], T], default: T) -> T:
        raise NotImplementedError

    @property
    def sessions(self) -> SessionQueries:
        """The sessions that are kept beside."""
        return SessionQueries(lambda query, default: self._ask(lambda file: query(file.sessions), default))

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the profile of that name, None where there is none."""
        return self._ask(lambda file: file.get(name), None)

    def put(self, name: str, profile: Mapping[str, Any]) -> bool:
        """Keep a profile, plain JSON types, in place of an earlier one, and tell whether it was written."""

        def write(file: CatalogFile) -> bool:
            file.put(name, profile)
            return True

        return self._ask(write, False)

    def settle(self, name: str, profile: Mapping[str, Any]) -> dict[str, Any]:
        """Return the profile of that name; `profile` becomes it if there is none."""
        return self._ask(lambda file: file.settle(name, profile), dict(profile))

    def delete(self, name: str) -> None:
        """Forget the profile of that name, if there is one."""
        self._ask(lambda file: file.delete(name), None)

    def names(self) -> list[str]:
        """Return the names of all profiles, sorted."""
        return self._ask(lambda file: file.names(), [])

    def add_texts(self, model: str, texts: Iterable[tuple[str, str, str]]) -> None:
        """Keep (key, text, source) of chunks that were encoded for the model digest `model`."""
        self._ask(lambda file: file.add_texts(model, texts), None)

    def texts(self, model: str) -> list[KnownText]:
        """Return all known texts of a model digest, oldest first."""
        return self._ask(lambda file: list(file.texts(model)), [])

    def count_texts(self, model: str) -> int:
        """Return how many known texts a model digest has; one of two sources counts twice."""
        return self._ask(lambda file: file.count_texts(model), 0)

    def oldest_texts(self, model: str, n: int) -> list[KnownText]:
        """Return the `n` texts of a model digest that were added first, oldest first."""
        return self._ask(lambda file: file.oldest_texts(model, n), [])

    def models(self) -> list[str]:
        """Return the model digests that texts are known of, sorted."""
        return self._ask(lambda file: file.models(), [])

    def tenants(self) -> list[str]:
        """Return the model digests that texts or sessions are kept of, sorted."""
        return self._ask(lambda file: file.tenants(), [])

    def delete_texts(
        self, model: str | None = None, *, source: str | None = None, keys: Iterable[str] | None = None
    ) -> int:
        """Forget the texts that match all that is given (nothing given: all texts); return how many there were."""
        return self._ask(lambda file: file.delete_texts(model, source=source, keys=keys), 0)


class SessionQueries:
    """The queries of a catalog's sessions. ask: runs one, and gives a default where the file does not answer."""

    def __init__(self, ask: Callable[[Callable[[SessionCatalog], Any], Any], Any]) -> None:
        self._ask = ask

    def get(self, model: str, id: str) -> tuple[int, float, dict[str, Any]] | None:
        """Return version, last use and state of a session, None where there is none."""
        found: tuple[int, float, dict[str, Any]] | None = self._ask(lambda sessions: sessions.get(model, id), None)
        return found

    def put(self, row: SessionRow, state: Mapping[str, Any], ends: Iterable[str], keys: Iterable[str]) -> bool | None:
        """Write a session in place of its `row.version`; False if another writer was first, None if nothing is kept."""
        kept: bool | None = self._ask(lambda sessions: sessions.put(row, state, ends, keys), None)
        return kept

    def ending(self, model: str, heard: Sequence[str]) -> dict[str, str]:
        """Return, of these digests of messages, those that a session's turn ends with, and that session."""
        found: dict[str, str] = self._ask(lambda sessions: sessions.ending(model, heard), {})
        return found

    def rows(self) -> list[SessionRow]:
        """Return all sessions, used last first."""
        found: list[SessionRow] = self._ask(lambda sessions: sessions.lines(), [])
        return found

    def count(self, model: str) -> int:
        """Return how many sessions a tenant has."""
        return int(self._ask(lambda sessions: sessions.count(model), 0))

    def owned(self) -> list[tuple[str, str, str]]:
        """Return tenant, session and key of every key of a session, in the order in which sessions were used."""
        found: list[tuple[str, str, str]] = self._ask(lambda sessions: sessions.owned(), [])
        return found

    def having(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that some session has."""
        found: list[str] = self._ask(lambda sessions: sessions.having(keys), [])
        return found

    def delete(self, model: str, id: str, before: float = inf) -> list[str] | None:
        """Forget a session that was used last before that time; return keys that no other one has."""
        orphans: list[str] | None = self._ask(lambda sessions: sessions.delete(model, id, before), None)
        return orphans


class Catalog(CatalogQueries):
    """A store's catalog, asked by those who go on without it. Threads may share it.

    A query gives its default where there is no file, and where the file cannot be read or written. The latter is
    counted in `failures`, said once in the log, and named by every answer that met it; the file is then left alone for
    `COOL_DOWN_S`, and a lock on it is waited for no longer than `LOCK_WAIT_S`.

    Args:
        file: None for a store without a disk, which keeps nothing.
    """

    def __init__(self, file: CatalogFile | None = None) -> None:
        self.file, self.failures = file, 0
        self._lock, self._why = ForkLock(), ""
        name = f"The catalog of {file.path}" if file is not None else ""
        self._breaker = Breaker(name, (StoreError,), cool_down_s=COOL_DOWN_S, said=_cause)
        self.strict = StrictCatalog(self)
        at_fork(self)

    def renew(self) -> None:
        """Count from nothing."""
        self.failures = 0

    def try_get(self, name: str) -> tuple[bool, dict[str, Any] | None]:
        """Tell whether the catalog answered, and return the profile of that name."""
        return self._try(lambda file: file.get(name))

    def try_texts(self, model: str) -> tuple[bool, list[KnownText] | None]:
        """Tell whether the catalog answered, and return the known texts of a model digest."""
        return self._try(lambda file: list(file.texts(model)))

    def try_session(self, model: str, id: str) -> tuple[bool, tuple[int, float, dict[str, Any]] | None]:
        """Tell whether the catalog answered, and return version, last use and state of a session."""
        return self._try(lambda file: file.sessions.get(model, id))

    def close(self) -> None:
        """Let go of the file: from now on nothing is kept."""
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
        try:
            with self._breaker.guard():
                try:
                    with file.lock_wait_limited(LOCK_WAIT_S):
                        return True, query(file)
                except StoreError:
                    if self.file is file:
                        raise
                    return False, None  # closed in this very moment
        except StoreError as error:
            self._why = f"{self._breaker.name}: {_cause(error)}"
        except BreakerOpen:
            pass
        with self._lock:
            self.failures += 1
        note(self._why)
        return False, None


class StrictCatalog(CatalogQueries):
    """The same catalog, which raises StoreError where its file cannot be read or written."""

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
            return default  # closed in this very moment


def _cause(error: Exception) -> str:
    """What the system said, without what is to be done where a store cannot be opened."""
    return str(error.__cause__ or error)
