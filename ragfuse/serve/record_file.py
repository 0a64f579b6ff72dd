"""SQLite files of records in a store's folder: a server's responses and documents."""

from __future__ import annotations

from ragfuse.settings import Settings
from ragfuse.store.database import Database
from ragfuse.store.folder import open_folder
from ragfuse.types.keys import digest


def record_file(settings: Settings, name: str, schema: str) -> Database:
    """Open tables in a file of the store's folder; where the store is in memory alone, in memory.

    Args:
        settings: Where the store is.
        name: The file's name.
        schema: CREATE TABLE statements.

    Raises:
        StoreError: It cannot be opened.
    """
    folder = open_folder(settings.store_path) if settings.disk_bytes else None
    return Database(folder, name, schema)


def tenant_digest(salt: str, *more: str) -> str:
    """Return the id of a tenant in record files: a digest from which its salt cannot be found."""
    return digest("records", salt, *more)
