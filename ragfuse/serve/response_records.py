"""The stored responses of `/v1/responses`: each tenant's latest, in this process.

A record has the response as it was sent, its input, and what it continues. The KV of a conversation is in the store,
under the session that all of its responses share; it outlives the process, the records do not.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragfuse.process.lru import LRU
from ragfuse.serve.refusals import APIError
from ragfuse.serve.response_schema import InputItem

MAX_RECORDS = 1024
"""Most stored responses of a tenant."""
MAX_RECORD_NBYTES = 32 << 20
"""Most bytes of a tenant's stored responses, as JSON."""


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
    nbytes: int = field(default=0)


class ResponseRecords:
    """The stored responses of all tenants; a tenant sees its own only. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_tenant: dict[str, dict[str, Record]] = {}
        self._continued: dict[str, LRU[str, bool]] = {}

    def get(self, tenant: str, id: str) -> Record:
        """Return a tenant's response; APIError (404) where there is none."""
        with self._lock:
            found = self._by_tenant.get(tenant, {}).get(id)
        if found is None:
            raise APIError(
                404,
                f"There is no response '{id:.80}' here: it was not stored, was deleted, is older than the latest "
                f"{MAX_RECORDS}, or the server was started anew. Send the whole conversation as input.",
                "response_not_found",
                "previous_response_id",
            )
        return found

    def conversation(self, tenant: str, id: str) -> list[InputItem]:
        """Return the items of a response and of all that it continues, oldest first; APIError (404) for a gap."""
        found, at = list[Record](), id or None
        while at is not None:
            found.append(record := self.get(tenant, at))
            at = record.previous
        return [item for record in reversed(found) for item in record.items]

    def session_after(self, tenant: str, previous: str | None, id: str) -> str:
        """Return the session for a response that continues `previous`: a new one for a second branch of it."""
        with self._lock:
            continued = self._continued.setdefault(tenant, LRU[str, bool](MAX_RECORDS))
            record = self._by_tenant.get(tenant, {}).get(previous or "")
            if record is None or continued.get(record.response["id"]):
                return id
            continued.add(record.response["id"], True)
            return record.session

    def add(
        self,
        tenant: str,
        response: dict[str, Any],
        items: Sequence[InputItem],
        previous: str | None,
        session: str,
    ) -> None:
        """Store a response; the oldest ones are dropped beyond the limits."""
        nbytes = len(json.dumps(response)) + sum(len(item.model_dump_json()) for item in items)
        record = Record(response, tuple(items), previous, session, nbytes)
        with self._lock:
            records = self._by_tenant.setdefault(tenant, {})
            records[response["id"]] = record
            total = sum(each.nbytes for each in records.values())
            while len(records) > MAX_RECORDS or (total > MAX_RECORD_NBYTES and len(records) > 1):
                total -= records.pop(next(iter(records))).nbytes

    def delete(self, tenant: str, id: str) -> Record:
        """Delete a response and return it; APIError (404) where there is none."""
        record = self.get(tenant, id)
        with self._lock:
            self._by_tenant[tenant].pop(id, None)
        return record

    def has_session(self, tenant: str, session: str) -> bool:
        """Return whether a stored response still belongs to a session."""
        with self._lock:
            return any(record.session == session for record in self._by_tenant.get(tenant, {}).values())
