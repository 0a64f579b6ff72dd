"""The stored responses of `/v1/responses`: each tenant's latest, in a SQLite file of the store's
folder.

A record has the response as it was sent, its input, and what it continues; the KV of its
conversation is in the store, under the session that all of its responses share. Both outlive the
process, and servers that share the folder share them; where the store is in memory alone, so are
the records. What continues a deleted response cannot be continued.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.serve.record_file import record_file, tenant_digest
from ragfuse.serve.refusals import APIError
from ragfuse.serve.response_schema import ITEMS, InputItem
from ragfuse.settings import Settings

log = logging.getLogger("ragfuse.serve")

RESPONSES_FILE = "responses.sqlite"
MAX_RECORDS = 1024
"""Most stored responses of a tenant."""
MAX_RECORD_NBYTES = 32 << 20
"""Most bytes of a tenant's stored responses, as JSON."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses(
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL,
    response TEXT NOT NULL,
    items TEXT NOT NULL, previous TEXT, session TEXT NOT NULL, nbytes INTEGER NOT NULL,
    made_s REAL NOT NULL,
    is_continued INTEGER NOT NULL DEFAULT 0, UNIQUE(tenant, id)
);
CREATE INDEX IF NOT EXISTS responses_of_session ON responses(tenant, session);
"""
_BEYOND_LIMITS = """
DELETE FROM responses WHERE number IN (
    SELECT number FROM (
        SELECT number, row_number() OVER latest AS rank, sum(nbytes) OVER latest AS total
        FROM responses WHERE tenant = :tenant WINDOW latest AS (ORDER BY number DESC)
    ) WHERE rank > 1 AND (rank > :most OR total > :most_nbytes)
)
"""
_UNUSED = """
DELETE FROM responses WHERE tenant = :tenant AND session IN (
    SELECT session FROM responses WHERE tenant = :tenant GROUP BY session
    HAVING max(made_s) < :since_s
)
"""
_CHAIN = """
WITH RECURSIVE chain AS (
    SELECT * FROM responses WHERE tenant = ? AND id = ?
    UNION ALL
    SELECT before.* FROM responses AS before JOIN chain
    ON before.tenant = chain.tenant AND before.id = chain.previous AND before.number < chain.number
)
SELECT response, items, previous, session FROM chain ORDER BY number DESC
"""
_ONE = "SELECT response, items, previous, session FROM responses WHERE tenant = ? AND id = ?"
_CONTINUE = """
UPDATE responses SET is_continued = 1 WHERE tenant = ? AND id = ? AND NOT is_continued
RETURNING session
"""


@dataclass(frozen=True)
class Record:
    """One stored response.

    Args:
        response: The response, as it was sent.
        items: Its input and output, as items.
        previous: The response that it continues; None for the first.
        session: The name of its conversation's session.
    """

    response: dict[str, Any]
    items: tuple[InputItem, ...]
    previous: str | None
    session: str


class ResponseRecords:
    """The stored responses of all tenants; a tenant sees its own only. Thread-safe; methods may
    wait for the disk.

    An unreadable file raises StoreError. Responses of a conversation that was
    continued last longer ago than `session_ttl_s` are deleted, as its session is.

    Args:
        settings: Where the store is, and how long sessions are kept.
        clock: Unix time in seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self._file = record_file(settings, RESPONSES_FILE, _SCHEMA)

    def get(self, salt: str, id: str) -> Record:
        """Return the response of the tenant with this salt; APIError (404) where there is none."""
        return self._found(salt, id, _ONE)[0]

    def conversation(self, salt: str, id: str) -> list[InputItem]:
        """Return the items of a response and of all that it continues, oldest first.

        Raises:
            APIError: There is no such response, or the beginning of its conversation is not stored
                any more (404).
        """
        records = self._found(salt, id, _CHAIN)
        if records[-1].previous is not None:
            raise _not_found(id)
        return [item for record in reversed(records) for item in record.items]

    def session_after(self, salt: str, previous: str | None, id: str) -> str:
        """Return the session for a response that continues `previous`: a new one for a second
        branch of it.
        """
        if previous is None:
            return id
        with self._file.write() as transaction:
            rows = transaction.execute(_CONTINUE, (tenant_digest(salt), previous)).fetchall()
        return str(rows[0][0]) if rows else id

    def add(
        self,
        salt: str,
        response: dict[str, Any],
        items: Sequence[InputItem],
        previous: str | None,
        session: str,
    ) -> None:
        """Store a response; the oldest ones of the tenant are deleted beyond the limits."""
        texts = (
            json.dumps(response),
            json.dumps([item.model_dump(exclude_none=True) for item in items]),
        )
        tenant, nbytes = tenant_digest(salt), sum(map(len, texts))
        row = (tenant, response["id"], *texts, previous, session, nbytes, self._clock())
        limits = {"tenant": tenant, "most": MAX_RECORDS, "most_nbytes": MAX_RECORD_NBYTES}
        with self._file.write() as transaction:
            transaction.execute(
                "INSERT INTO responses(tenant, id, response, items, previous, session, nbytes,"
                " made_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            transaction.execute(_BEYOND_LIMITS, limits)

    def delete(self, salt: str, id: str) -> str | None:
        """Delete a response; return its session if no other one belongs to it; APIError (404) where
        there is none.
        """
        tenant, session = tenant_digest(salt), self.get(salt, id).session
        with self._file.write() as transaction:
            transaction.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, id))
            sql = "SELECT 1 FROM responses WHERE tenant = ? AND session = ? LIMIT 1"
            return None if transaction.execute(sql, (tenant, session)).fetchall() else session

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _found(self, salt: str, id: str, sql: str) -> list[Record]:
        """Return the records that a query finds for a tenant and an id; APIError (404) for none, or
        a damaged one.
        """
        self._delete_unused(salt)
        rows = self._file.query(sql, (tenant_digest(salt), id))
        try:
            found = [
                Record(
                    json.loads(row[0] or "{}"), ITEMS.validate_python(json.loads(row[1])), *row[2:4]
                )
                for row in rows
            ]
        except ValueError:
            log.warning("A stored response is damaged, and is taken as missing.")
            found = []
        if not found:
            raise _not_found(id)
        return found

    def _delete_unused(self, salt: str) -> None:
        """Delete the tenant's responses whose sessions are too old."""
        if self._settings.session_ttl_s is None:
            return
        with self._file.write() as transaction:
            since_s = self._clock() - self._settings.session_ttl_s
            transaction.execute(_UNUSED, {"tenant": tenant_digest(salt), "since_s": since_s})


def _not_found(id: str) -> APIError:
    return APIError(
        404,
        f"There is no response '{id:.80}' here, or not all that it continues: it was not stored,"
        f" was deleted, or is older than the latest {MAX_RECORDS}. Send the whole conversation as"
        " input.",
        "response_not_found",
        "previous_response_id",
    )
