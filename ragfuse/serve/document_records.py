"""The documents that tenants have sent, with their passages and vectors, in a SQLite file of the
store's folder.

They outlive the process as the KV of their passages does, and servers that share the folder share
them.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ragfuse.serve.record_file import record_file, tenant_digest
from ragfuse.settings import Settings

log = logging.getLogger("ragfuse.serve")

DOCUMENTS_FILE = "documents.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS embedded(
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    name TEXT NOT NULL, document TEXT NOT NULL, vectors BLOB NOT NULL, UNIQUE(tenant, id)
);
"""


class StoredDocument(BaseModel):
    """One document and how far its passages are."""

    name: str
    id: str = Field(default_factory=lambda: f"doc_{uuid4().hex[:24]}")
    status: str = "waiting"
    error: str = ""
    passages: list[str] = []
    encoded: int = 0
    """Passages that are done."""
    nbytes: int = 0
    """Bytes of the KV that was encoded for it; what was stored before does not count."""
    vectors: Any = Field(default_factory=list, exclude=True)
    """float32 [passages, dims]."""
    is_deleted: bool = Field(default=False, exclude=True)

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain JSON types, with the number of its passages in place of their text."""
        told = {"object": "ragfuse.document", "passages": len(self.passages)}
        return {**self.model_dump(), **told}


class DocumentRecords:
    """The documents of all tenants. Thread-safe; methods may wait for the disk, and raise
    StoreError where it fails.

    Args:
        settings: Where the store is.
        embedder: Name of the embedder, with whose vectors the documents are stored; those of
            another embedder are not seen.
    """

    def __init__(self, settings: Settings, embedder: str) -> None:
        self._file, self._embedder = record_file(settings, DOCUMENTS_FILE, _SCHEMA), embedder

    def ids(self, salt: str) -> list[str]:
        """Return the ids of the documents of the tenant with this salt, the oldest first."""
        sql = "SELECT id FROM embedded WHERE tenant = ? ORDER BY number"
        return [str(row[0]) for row in self._file.query(sql, (self._tenant(salt),))]

    def read(self, salt: str, id: str) -> StoredDocument | None:
        """Return a document; None for none or a damaged one."""
        sql = "SELECT document, vectors FROM embedded WHERE tenant = ? AND id = ?"
        for text, vectors in self._file.query(sql, (self._tenant(salt), id)):
            try:
                found = StoredDocument.model_validate_json(text)
                shape = len(found.passages), -1
                found.vectors = np.frombuffer(vectors, dtype="<f4").reshape(shape)
            except (TypeError, ValueError):
                log.warning("A stored document is damaged, and is taken as missing.")
                return None
            return found
        return None

    def add(self, salt: str, document: StoredDocument, vectors: NDArray[np.float32]) -> None:
        """Store a document with its vectors, in place of those of the same name or id."""
        named = self._tenant(salt), document.name, document.id
        blob = np.ascontiguousarray(vectors, dtype="<f4").tobytes()
        with self._file.write() as transaction:
            transaction.execute(
                "DELETE FROM embedded WHERE tenant = ? AND (name = ? OR id = ?)", named
            )
            transaction.execute(
                "INSERT INTO embedded(tenant, name, id, document, vectors) VALUES (?, ?, ?, ?, ?)",
                (*named, document.model_dump_json(), blob),
            )

    def delete(self, salt: str, id: str) -> None:
        """Delete a document of a tenant, if it is there."""
        sql = "DELETE FROM embedded WHERE tenant = ? AND id = ?"
        self._file.change(sql, (self._tenant(salt), id))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _tenant(self, salt: str) -> str:
        return tenant_digest(salt, self._embedder)
