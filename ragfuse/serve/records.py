"""SQLite files in the store's folder: the stored responses and documents of all tenants.

The files outlive the process. All servers with the same folder use the same files. If the store has
no folder, the tables are in memory.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from ragfuse.serve.refusals import APIError
from ragfuse.serve.schema import INPUT, RequestMessage
from ragfuse.settings import Settings
from ragfuse.store.database import Database
from ragfuse.store.folder import open_folder
from ragfuse.types.keys import digest


def record_file(settings: Settings, name: str, schema: str) -> Database:
    """Open a database in the store's folder, or in memory if the store has no folder."""
    folder = open_folder(settings.store_path) if settings.disk_bytes else None
    return Database(folder, name, schema)


def tenant_digest(salt: str, *more: str) -> str:
    """Return a tenant's id in record files. The id does not reveal the salt."""
    return digest("records", salt, *more)


log = logging.getLogger("ragfuse.serve")

RESPONSES_FILE = "responses.sqlite"
MAX_RECORDS = 1024
MAX_RECORD_NBYTES = 32 << 20
"""Maximum bytes of a tenant's stored responses, as JSON."""
_RESPONSES = """
CREATE TABLE IF NOT EXISTS turns(
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    response TEXT NOT NULL, messages TEXT NOT NULL, session TEXT NOT NULL,
    nbytes INTEGER NOT NULL, made_s REAL NOT NULL, UNIQUE(tenant, id)
);
CREATE INDEX IF NOT EXISTS turns_of_session ON turns(tenant, session);
"""
_BEYOND_LIMITS = """
DELETE FROM turns WHERE number IN (
    SELECT number FROM (
        SELECT number, row_number() OVER latest AS rank, sum(nbytes) OVER latest AS total
        FROM turns WHERE tenant = :tenant WINDOW latest AS (ORDER BY number DESC)
    ) WHERE rank > 1 AND (rank > :most OR total > :most_nbytes)
)
"""
_UNUSED = """
DELETE FROM turns WHERE tenant = :tenant AND session IN (
    SELECT session FROM turns WHERE tenant = :tenant GROUP BY session
    HAVING max(made_s) < :since_s
)
"""


class Record(NamedTuple):
    """A stored response, the conversation that ends with the response, and the session's name."""

    response: dict[str, Any]
    messages: list[RequestMessage]
    session: str


class ResponseRecords:
    """The stored responses of all tenants. Thread-safe; methods may block.

    A conversation that was not continued for `session_ttl_s` seconds is deleted. An unreadable file
    raises StoreError.

    Args:
        settings: The settings. The store's folder and `session_ttl_s` are used.
        clock: Returns Unix time in seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._ttl_s, self._clock = settings.session_ttl_s, clock
        self._file = record_file(settings, RESPONSES_FILE, _RESPONSES)

    def get(self, salt: str, id: str) -> Record:
        """Return a tenant's response; APIError (404) if the response is missing or damaged."""
        tenant = tenant_digest(salt)
        if self._ttl_s is not None:
            with self._file.write() as transaction:
                since_s = self._clock() - self._ttl_s
                transaction.execute(_UNUSED, {"tenant": tenant, "since_s": since_s})
        sql = "SELECT response, messages, session FROM turns WHERE tenant = ? AND id = ?"
        for response, messages, session in self._file.query(sql, (tenant, id)):
            try:
                found = INPUT.validate_python(json.loads(messages))
                return Record(json.loads(response), found, session)
            except ValueError:
                log.warning("A stored response is damaged, and treated as missing.")
        raise APIError(
            404,
            f"There is no response '{id:.80}'. It was not stored, was deleted, has expired, or is"
            f" not among the latest {MAX_RECORDS}. Send the whole conversation as input.",
            "response_not_found",
            "previous_response_id",
        )

    def add(
        self,
        salt: str,
        response: dict[str, Any],
        messages: Sequence[RequestMessage],
        session: str,
    ) -> None:
        """Store a response; delete the tenant's oldest responses beyond the limits."""
        told = [message.model_dump(exclude_none=True) for message in messages]
        texts = json.dumps(response), json.dumps(told)
        tenant, nbytes = tenant_digest(salt), sum(map(len, texts))
        row = (tenant, response["id"], *texts, session, nbytes, self._clock())
        limits = {"tenant": tenant, "most": MAX_RECORDS, "most_nbytes": MAX_RECORD_NBYTES}
        with self._file.write() as transaction:
            transaction.execute(
                "INSERT INTO turns(tenant, id, response, messages, session, nbytes, made_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            transaction.execute(_BEYOND_LIMITS, limits)

    def delete(self, salt: str, id: str) -> str | None:
        """Delete a response. Return the session's name if no other response is in the session.

        Raises:
            APIError: The response does not exist (404).
        """
        tenant, session = tenant_digest(salt), self.get(salt, id).session
        with self._file.write() as transaction:
            transaction.execute("DELETE FROM turns WHERE tenant = ? AND id = ?", (tenant, id))
            sql = "SELECT 1 FROM turns WHERE tenant = ? AND session = ? LIMIT 1"
            return None if transaction.execute(sql, (tenant, session)).fetchall() else session

    def close(self) -> None:
        """Close the file of responses."""
        self._file.close()


DOCUMENTS_FILE = "documents.sqlite"
_DOCUMENTS = """
CREATE TABLE IF NOT EXISTS embedded(
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    name TEXT NOT NULL, document TEXT NOT NULL, vectors BLOB NOT NULL, UNIQUE(tenant, id)
);
"""


class StoredDocument(BaseModel):
    """An uploaded document: passages, embeddings, and the progress of encoding."""

    name: str
    id: str = Field(default_factory=lambda: f"doc_{uuid4().hex[:24]}")
    status: str = "waiting"
    error: str = ""
    passages: list[str] = []
    encoded: int = 0
    nbytes: int = 0
    """Bytes of KV encoded for this document, excluding KV that was already stored."""
    vectors: Any = Field(default_factory=list, exclude=True)
    """Embeddings of the passages, float32 [passages, dims]."""
    is_deleted: bool = Field(default=False, exclude=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the document as JSON types. The field `passages` is the number of passages."""
        told = {"object": "ragfuse.document", "passages": len(self.passages)}
        return {**self.model_dump(), **told}


class DocumentRecords:
    """The ready documents of all tenants. Thread-safe; methods may block or raise StoreError.

    Args:
        settings: The settings. The store's folder is used.
        embedder: Name of the embedder. Documents that another embedder embedded are ignored.
    """

    def __init__(self, settings: Settings, embedder: str) -> None:
        self._file, self._embedder = record_file(settings, DOCUMENTS_FILE, _DOCUMENTS), embedder

    def ids(self, salt: str) -> list[str]:
        """Return the ids of a tenant's documents, oldest first."""
        sql = "SELECT id FROM embedded WHERE tenant = ? ORDER BY number"
        return [str(row[0]) for row in self._file.query(sql, (self._tenant(salt),))]

    def read(self, salt: str, id: str) -> StoredDocument | None:
        """Return a tenant's document; None if the document is missing or damaged."""
        sql = "SELECT document, vectors FROM embedded WHERE tenant = ? AND id = ?"
        for text, vectors in self._file.query(sql, (self._tenant(salt), id)):
            try:
                found = StoredDocument.model_validate_json(text)
                shape = len(found.passages), -1
                found.vectors = np.frombuffer(vectors, dtype="<f4").reshape(shape)
                return found
            except (TypeError, ValueError):
                log.warning("A stored document is damaged, and treated as missing.")
        return None

    def add(self, salt: str, document: StoredDocument, vectors: NDArray[np.float32]) -> None:
        """Store a document and its embeddings, replacing documents of the same name or id."""
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
        """Delete a tenant's document. An unknown id is ignored."""
        sql = "DELETE FROM embedded WHERE tenant = ? AND id = ?"
        self._file.change(sql, (self._tenant(salt), id))

    def close(self) -> None:
        """Close the file of documents."""
        self._file.close()

    def _tenant(self, salt: str) -> str:
        return tenant_digest(salt, self._embedder)
