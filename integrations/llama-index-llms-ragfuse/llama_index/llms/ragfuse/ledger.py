"""Which version of which document has which texts: what tells the KV that no document uses any more.

One small SQLite file in the store's folder, for all processes on that store; in memory for a store without a disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock
from weakref import ref

from ragfuse import StoreError

FILE = "llama-index.sqlite3"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS versions (model TEXT, collection TEXT, document TEXT, version TEXT, noted INTEGER, "
    "PRIMARY KEY (model, collection, document, version)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS texts (model TEXT, collection TEXT, document TEXT, version TEXT, text TEXT, "
    "PRIMARY KEY (model, text, collection, document, version)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS collected (model TEXT, collection TEXT, times INTEGER, "
    "PRIMARY KEY (model, collection)) WITHOUT ROWID",
)
_WAIT_S = 60.0
_PAUSE_S = 5.0
"""Seconds that a fork waits, at most, for a change that another thread is making."""

Keep = Callable[[str, str, bool, str], bool]
"""Whether a text is in use still: its document, that one's version, whether this is the newest version, the text."""


class Ledger:
    """Uses of texts by documents, per model and collection. Thread-safe; several processes may share a file."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._memory = sqlite3.connect(":memory:", check_same_thread=False) if folder is None else None
        self.renew()
        _follow_forks(self)

    def pause(self) -> None:
        """Wait for the change at hand, before the process is forked: SQLite wants no file to be open then."""
        self._is_paused = self._lock.acquire(timeout=_PAUSE_S)

    def resume(self) -> None:
        """Go on in the process that was forked."""
        if self._is_paused:
            self._is_paused = False
            self._lock.release()

    def renew(self) -> None:
        """Begin anew in a forked process."""
        self._lock, self._is_paused = Lock(), False

    def note(self, model: str, collection: str, uses: Iterable[tuple[str, str, str]]) -> None:
        """These (document, version, text) are in use now, and these versions are the newest of their documents."""
        rows = [tuple(map(_plain, use)) for use in uses]
        with self._changing() as tables:
            last = tables.execute("SELECT coalesce(max(noted), 0) FROM versions").fetchone()[0]
            versions = dict.fromkeys((document, version) for document, version, _ in rows)
            tables.executemany(
                "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?)",
                [(model, collection, *each, last + 1 + number) for number, each in enumerate(versions)],
            )
            tables.executemany(
                "INSERT OR IGNORE INTO texts VALUES (?, ?, ?, ?, ?)", [(model, collection, *row) for row in rows]
            )

    def collect(self, model: str, collection: str, keep: Keep, forget: Callable[[list[str]], int]) -> int:
        """What `forget` gives for the texts that no document uses any more; uses that `keep` denies are taken out.

        A text is handed over only if no other document, version or collection has it. Where `forget` fails, all stays.
        """
        with self._changing() as tables:
            gone = [use for use, newest in _uses(tables, model, collection) if not keep(*use[:2], newest, use[2])]
            for use in gone:
                tables.execute(
                    "DELETE FROM texts "
                    "WHERE model = ? AND collection = ? AND document = ? AND version = ? AND text = ?",
                    (model, collection, *use),
                )
            free = [text for text in dict.fromkeys(text for _, _, text in gone) if not _used(tables, model, text)]
            tables.execute(
                "DELETE FROM versions WHERE (model, collection, document, version) NOT IN "
                "(SELECT model, collection, document, version FROM texts)"
            )
            if not free:
                return 0
            tables.execute(
                "INSERT INTO collected VALUES (?, ?, 1) "
                "ON CONFLICT (model, collection) DO UPDATE SET times = times + 1",
                (model, collection),
            )
            return forget(free)

    def collected(self, model: str, collection: str) -> int:
        """How often texts were forgotten: a pipeline's cache must not skip a step for what it did before that."""
        with self._changing() as tables:
            found = tables.execute(
                "SELECT times FROM collected WHERE model = ? AND collection = ?", (model, collection)
            ).fetchone()
        return int(found[0]) if found else 0

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """The tables, for one change of all or nothing."""
        try:
            with self._lock, self._opened() as tables, tables:
                tables.execute("BEGIN IMMEDIATE")
                for table in _TABLES:
                    tables.execute(table)
                yield tables
        except sqlite3.Error as error:
            raise StoreError(
                f"The list of documents at {self._path} cannot be used: wanted a SQLite file of this package, found "
                f"'{error}'. Remove it to begin a new one; KV of documents deleted before stays until it is evicted."
            ) from error

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            self._memory.isolation_level = None
            yield self._memory
            return
        assert self._path is not None
        if not self._path.exists():
            # Who may use the folder may use what is in it: this user, or the group of one that is shared (02770).
            is_shared = self._path.parent.stat().st_mode & 0o2020 == 0o2020
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if is_shared:
                self._path.chmod(0o660)
        with closing(sqlite3.connect(str(self._path), timeout=_WAIT_S, isolation_level=None)) as tables:
            yield tables


def _follow_forks(ledger: Ledger) -> None:
    """Let a ledger hear of forks, before the engine does, whose locks a change may wait for."""
    mine = ref(ledger)

    def tell(what: Callable[[Ledger], None]) -> None:
        held = mine()
        if held is not None:
            what(held)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: tell(Ledger.pause),
            after_in_parent=lambda: tell(Ledger.resume),
            after_in_child=lambda: tell(Ledger.renew),
        )


def _plain(text: str) -> str:
    """A text as SQLite takes it: U+FFFD for halves of characters."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _uses(tables: sqlite3.Connection, model: str, collection: str) -> list[tuple[tuple[str, str, str], bool]]:
    """((document, version, text), whether that is the document's newest version) of a collection."""
    rows = tables.execute(
        "SELECT document, version, text, noted = max(noted) OVER (PARTITION BY document) FROM texts "
        "JOIN versions USING (model, collection, document, version) WHERE model = ? AND collection = ?",
        (model, collection),
    )
    return [((document, version, text), bool(newest)) for document, version, text, newest in rows]


def _used(tables: sqlite3.Connection, model: str, text: str) -> bool:
    found = tables.execute("SELECT 1 FROM texts WHERE model = ? AND text = ? LIMIT 1", (model, text)).fetchone()
    return found is not None
