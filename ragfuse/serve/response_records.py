"""The stored responses of `/v1/responses`: each tenant's latest, in a SQLite file of the store's
folder.

A record has the response as it was sent and the whole conversation up to it; the KV of the
conversation is in the store, under the session that all of its responses share. Both outlive the
process, and servers that share the folder share them; where the store is in memory alone, so are
the records.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ragfuse.serve.record_file import record_file, tenant_digest
from ragfuse.serve.refusals import APIError
from ragfuse.serve.response_schema import INPUT
from ragfuse.serve.schema import RequestMessage
from ragfuse.settings import Settings

log = logging.getLogger("ragfuse.serve")

RESPONSES_FILE = "responses.sqlite"
MAX_RECORDS = 1024
"""Most stored responses of a tenant."""
MAX_RECORD_NBYTES = 32 << 20
"""Most bytes of a tenant's stored responses, as JSON."""
_SCHEMA = """
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
    """One stored response, as it was sent; the conversation up to it; the name of its session."""

    response: dict[str, Any]
    messages: list[RequestMessage]
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
        self._ttl_s, self._clock = settings.session_ttl_s, clock
        self._file = record_file(settings, RESPONSES_FILE, _SCHEMA)

    def get(self, salt: str, id: str) -> Record:
        """Return the response of the tenant with this salt; APIError (404) where there is none, or
        a damaged one.
        """
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
                log.warning("A stored response is damaged, and is taken as missing.")
        raise APIError(
            404,
            f"There is no response '{id:.80}' here: it was not stored, was deleted, or is older"
            f" than the latest {MAX_RECORDS}. Send the whole conversation as input.",
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
        """Store a response; the oldest ones of the tenant are deleted beyond the limits."""
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
        """Delete a response. Return its session if no other response uses that session, else None.

        Raises:
            APIError: The response does not exist (404).
        """
        tenant, session = tenant_digest(salt), self.get(salt, id).session
        with self._file.write() as transaction:
            transaction.execute("DELETE FROM turns WHERE tenant = ? AND id = ?", (tenant, id))
            sql = "SELECT 1 FROM turns WHERE tenant = ? AND session = ? LIMIT 1"
            return None if transaction.execute(sql, (tenant, session)).fetchall() else session

    def close(self) -> None:
        """Close the file."""
        self._file.close()
