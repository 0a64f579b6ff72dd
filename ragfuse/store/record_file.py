"""A SQLite file of records in a store's folder: a server's responses and documents."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from ragfuse.settings import Settings
from ragfuse.store.database import Database, store_errors
from ragfuse.store.database import Row as Row
from ragfuse.store.folder import locked, open_folder
from ragfuse.types.keys import FORMAT_VERSION, digest


class RecordFile(Database):
    """Tables in a file of the store's folder; where the store is in memory alone, in memory.

    Thread-safe; processes may share the file. Methods may wait for the disk, and raise StoreError where the file cannot
    be read or written, as does opening it.

    Args:
        settings: Where the store is.
        name: The file's name.
        schema: CREATE TABLE statements.
    """

    def __init__(self, settings: Settings, name: str, schema: str) -> None:
        self._where = settings.store_path, name
        folder = open_folder(settings.store_path, settings.shared_with) if settings.disk_bytes else None
        with store_errors(*self._where), locked(folder / "lock") if folder is not None else nullcontext():
            super().__init__(folder and folder / name, schema, FORMAT_VERSION)

    def query(self, sql: str, arguments: Sequence[Any] = ()) -> list[Row]:
        """Return all rows of a query."""
        with store_errors(*self._where):
            return super().query(sql, arguments)

    @contextmanager
    def write(self, wait_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction; it is rolled back if the block raises."""
        with store_errors(*self._where), super().write(wait_s) as transaction:
            yield transaction


def tenant_digest(salt: str) -> str:
    """Return the name of a tenant in such files, from which its salt cannot be found."""
    return digest("records", salt)
