"""Records the texts of each version of each document, to find the KV that no document uses any more.

It is one small SQLite file in the store's folder, shared by all processes, or in memory for a store without a disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from ragfuse import StoreError
from ragfuse.types.whole_text import whole_text

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
"""The most seconds that a change waits for another process to finish its own."""

Keep = Callable[[str, str, bool, str], bool]
"""A function that returns whether a text is in use, of (document, version, is that the newest version, text)."""


class Ledger:
    """Uses of texts by documents, per model and collection. Thread-safe; several processes may share a file."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._memory = sqlite3.connect(":memory:", check_same_thread=False) if folder is None else None
        self._lock = Lock()

    def note(self, model: str, collection: str, uses: Iterable[tuple[str, str, str]]) -> None:
        """Record that these (document, version, text) are in use, and these versions the newest of their documents."""
        rows = [tuple(map(whole_text, use)) for use in uses]
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
        """Remove the uses that `keep` rejects, and call `forget` with the texts that have no use left.

        A text is passed to `forget` only if no other document, version or collection uses it. If `forget` fails, all
        changes are undone.

        Returns:
            The result of `forget`; 0 if there is nothing to forget.
        """
        with self._changing() as tables:
            unused = [use for use, newest in _uses(tables, model, collection) if not keep(*use[:2], newest, use[2])]
            for use in unused:
                tables.execute(
                    "DELETE FROM texts "
                    "WHERE model = ? AND collection = ? AND document = ? AND version = ? AND text = ?",
                    (model, collection, *use),
                )
            free_texts = [
                text for text in dict.fromkeys(text for _, _, text in unused) if not _used(tables, model, text)
            ]
            tables.execute(
                "DELETE FROM versions WHERE (model, collection, document, version) NOT IN "
                "(SELECT model, collection, document, version FROM texts)"
            )
            if not free_texts:
                return 0
            tables.execute(
                "INSERT INTO collected VALUES (?, ?, 1) "
                "ON CONFLICT (model, collection) DO UPDATE SET times = times + 1",
                (model, collection),
            )
            return forget(free_texts)

    def collected(self, model: str, collection: str) -> int:
        """Return how often texts were forgotten; part of a pipeline's cache key, so that forgotten texts are redone."""
        with self._changing() as tables:
            found = tables.execute(
                "SELECT times FROM collected WHERE model = ? AND collection = ?", (model, collection)
            ).fetchone()
        return int(found[0]) if found else 0

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Yield the tables in one transaction."""
        try:
            with self._lock, self._opened() as tables, tables:
                tables.execute("BEGIN IMMEDIATE")
                for table in _TABLES:
                    tables.execute(table)
                yield tables
        except sqlite3.Error as error:
            raise StoreError(
                f"The list of documents at {self._path} cannot be used ({error}). If it is damaged, delete the file: a "
                "new one is started. KV of documents deleted until then stays in the store until it is evicted."
            ) from error

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if self._memory is not None:
            self._memory.isolation_level = None
            yield self._memory
            return
        assert self._path is not None
        if not self._path.exists():
            # The file is open to whoever may use the folder: this user, or the group if the folder is shared (02770).
            is_shared = self._path.parent.stat().st_mode & 0o2020 == 0o2020
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if is_shared:
                self._path.chmod(0o660)
        with closing(sqlite3.connect(str(self._path), timeout=_WAIT_S, isolation_level=None)) as tables:
            yield tables


def _uses(tables: sqlite3.Connection, model: str, collection: str) -> list[tuple[tuple[str, str, str], bool]]:
    """Return all ((document, version, text), whether that is the document's newest version) of a collection."""
    rows = tables.execute(
        "SELECT document, version, text, noted = max(noted) OVER (PARTITION BY document) FROM texts "
        "JOIN versions USING (model, collection, document, version) WHERE model = ? AND collection = ?",
        (model, collection),
    )
    return [((document, version, text), bool(newest)) for document, version, text, newest in rows]


def _used(tables: sqlite3.Connection, model: str, text: str) -> bool:
    found = tables.execute("SELECT 1 FROM texts WHERE model = ? AND text = ? LIMIT 1", (model, text)).fetchone()
    return found is not None
