"""A SQLite file of records in a store's folder, opened at first use: a server's responses and documents."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ragfuse.settings import Settings
from ragfuse.store.database import Database, store_errors
from ragfuse.store.database import Row as Row
from ragfuse.store.folder import open_folder
from ragfuse.types.keys import FORMAT_VERSION, digest


class RecordFile:
    """Tables in a file of the store's folder; where the store is in memory alone, in memory.

    It is opened at first use. Thread-safe; processes may share the file. Methods may wait for the disk, and raise
    StoreError where the file cannot be read or written.

    Args:
        settings: Where the store is.
        name: The file's name.
        schema: CREATE TABLE statements.
    """

    def __init__(self, settings: Settings, name: str, schema: str) -> None:
        self._settings, self._name, self._schema = settings, name, schema
        self._lock = threading.Lock()
        self._opened: Database | None = None

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Return all rows of a query."""
        with store_errors(self._settings.store_path, self._name):
            return self._database().query(sql, arguments)

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction; it is rolled back if the block raises."""
        with store_errors(self._settings.store_path, self._name), self._database().write() as transaction:
            yield transaction

    def close(self) -> None:
        """Close the file; a later use opens it again."""
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _database(self) -> Database:
        with self._lock:
            if self._opened is None and self._settings.disk_bytes:
                folder = open_folder(self._settings.store_path, self._settings.shared_with)
                self._opened = Database.in_folder(folder, self._name, self._schema)
            self._opened = self._opened or Database(None, self._schema, FORMAT_VERSION)
            return self._opened


def tenant_digest(salt: str) -> str:
    """Return the name of a tenant in such files, from which its salt cannot be found."""
    return digest("records", salt)
