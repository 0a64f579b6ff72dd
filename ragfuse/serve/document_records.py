"""The documents that tenants have sent, with their passages and vectors, in a SQLite file of the store's folder.

They outlive the process as the KV of their passages does, and servers that share the folder share them. Of a document
that is still being encoded the file has claims alone: the passages whose KV is there for nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragfuse.settings import Settings
from ragfuse.store.record_file import RecordFile, Row, tenant_digest

log = logging.getLogger("ragfuse.serve")

DOCUMENTS_FILE = "documents.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents(
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL,
    passages TEXT NOT NULL, own TEXT NOT NULL, counts TEXT NOT NULL, embedder TEXT NOT NULL, vectors BLOB NOT NULL,
    UNIQUE(tenant, id)
);
CREATE TABLE IF NOT EXISTS claims(
    tenant TEXT NOT NULL, passage TEXT NOT NULL, PRIMARY KEY(tenant, passage)
) WITHOUT ROWID;
"""
_DISCLAIM = "DELETE FROM claims WHERE tenant = ? AND passage = ?"


@dataclass(frozen=True)
class DocumentRecord:
    """A document whose passages are encoded.

    Args:
        id: Its id.
        name: Its name, for people.
        passages: Its passages, in their order.
        own: Those whose KV was encoded for it.
        counts: What was counted as it was encoded, by name.
        vectors: float32 [passages, dims]; None where another embedder made them.
    """

    id: str
    name: str
    passages: list[str]
    own: list[str]
    counts: dict[str, float]
    vectors: NDArray[np.float32] | None


class DocumentRecords:
    """The documents of all tenants. Thread-safe; methods may wait for the disk, and raise StoreError where it fails.

    Args:
        settings: Where the store is.
        embedder: Name of the embedder, whose vectors are stored and returned.
    """

    def __init__(self, settings: Settings, embedder: str) -> None:
        self._file, self._embedder = RecordFile(settings, DOCUMENTS_FILE, _SCHEMA), embedder

    def ids(self, salt: str) -> list[str]:
        """Return the ids of the documents of the tenant with this salt, the oldest first."""
        sql = "SELECT id FROM documents WHERE tenant = ? ORDER BY number"
        return [str(row[0]) for row in self._file.query(sql, (tenant_digest(salt),))]

    def read(self, salt: str, id: str) -> DocumentRecord | None:
        """Return a document of a tenant; None where there is none, or a damaged one."""
        sql = "SELECT id, name, passages, own, counts, embedder, vectors FROM documents WHERE tenant = ? AND id = ?"
        rows = self._file.query(sql, (tenant_digest(salt), id))
        try:
            return _record(rows[0], self._embedder) if rows else None
        except (TypeError, ValueError):
            log.warning("A stored document is damaged, and is taken as missing.")
            return None

    def add(self, salt: str, record: DocumentRecord) -> None:
        """Store a document with its vectors, in place of those of the same name or id and of claims to its passages."""
        tenant = tenant_digest(salt)
        texts = json.dumps(record.passages), json.dumps(record.own), json.dumps(record.counts)
        blob = np.ascontiguousarray(record.vectors, dtype="<f4").tobytes()
        with self._file.write() as transaction:
            transaction.execute(
                "DELETE FROM documents WHERE tenant = ? AND (name = ? OR id = ?)", (tenant, record.name, record.id)
            )
            transaction.execute(
                "INSERT INTO documents(tenant, id, name, passages, own, counts, embedder, vectors) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (tenant, record.id, record.name, *texts, self._embedder, blob),
            )
            transaction.executemany(_DISCLAIM, [(tenant, passage) for passage in record.own])

    def claim(self, salt: str, passages: Sequence[str]) -> None:
        """Note passages whose KV is encoded for a document that is not stored yet, in case that it never is."""
        with self._file.write() as transaction:
            rows = [(tenant_digest(salt), passage) for passage in passages]
            transaction.executemany("INSERT OR IGNORE INTO claims VALUES (?, ?)", rows)

    def disclaim(self, salt: str, passages: Sequence[str]) -> None:
        """Drop claims to these passages; others are ignored."""
        with self._file.write() as transaction:
            transaction.executemany(_DISCLAIM, [(tenant_digest(salt), passage) for passage in passages])

    def claims(self, salt: str) -> list[str]:
        """Return the passages whose KV was encoded for documents that are not stored."""
        rows = self._file.query("SELECT passage FROM claims WHERE tenant = ?", (tenant_digest(salt),))
        return [str(row[0]) for row in rows]

    def delete(self, salt: str, ids: Sequence[str]) -> None:
        """Delete documents of a tenant; ids that are not there are ignored."""
        rows = [(tenant_digest(salt), id) for id in ids]
        with self._file.write() as transaction:
            transaction.executemany("DELETE FROM documents WHERE tenant = ? AND id = ?", rows)

    def close(self) -> None:
        """Close the file; a later use opens it again."""
        self._file.close()


def _record(row: Row, embedder: str) -> DocumentRecord:
    """Return a row as a record; TypeError or ValueError for one that is damaged."""
    id, name, passages, own, counts, by, vectors = row
    texts, mine, numbers = json.loads(passages), json.loads(own), json.loads(counts)
    if not (_are_texts(texts) and _are_texts(mine) and isinstance(name, str) and isinstance(numbers, dict)):
        raise ValueError("the fields have other types")
    if not all(isinstance(each, int | float) for each in numbers.values()) or not texts:
        raise ValueError("the counts are no numbers, or there is no passage")
    table = np.frombuffer(vectors, dtype="<f4").reshape(len(texts), -1)
    if not np.isfinite(table).all():
        raise ValueError("the vectors are not finite")
    return DocumentRecord(id, name, texts, mine, numbers, table if by == embedder else None)


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)
