"""The schemas that are registered at a server, for prompts in PML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from ragfuse.remote.connection import Connection
from ragfuse.remote.request_body import encoded
from ragfuse.schemas.nodes import Schema
from ragfuse.schemas.pml import parse_schema, to_pml
from ragfuse.types.answer import Ingested

Progress = Callable[[Ingested], None]
ROUTE = "ragfuse/schemas"


@dataclass(frozen=True)
class RemoteSchema:
    """A schema that a server has registered, with the counts of its encoding."""

    name: str
    done: Ingested


class RemoteSchemas:
    """Registers schemas at a server.

    Args:
        connection: The connection to it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def has(self, schema: Schema) -> bool:
        """Return whether the server has an equal schema."""
        found = self._connection.ask("GET", f"{ROUTE}/{quote(schema.name, safe='')}")
        return found is not None and parse_schema(found["pml"]) == schema

    def ensure(self, schema: Schema, progress: Progress | None = None) -> RemoteSchema | None:
        """Register a schema unless the server has it already; None where it does."""
        return None if self.has(schema) else self.register(schema, progress)

    def register(self, schema: Schema, progress: Progress | None = None) -> RemoteSchema:
        """Register a schema, which the server encodes; it replaces one of the same name.

        Args:
            schema: The schema.
            progress: Called once, at the end.
        """
        found = self._connection.ask("POST", ROUTE, encoded({"pml": to_pml(schema)})) or {}
        done = Ingested(found["runs"], found["encoded"], found["tokens"], found["nbytes"])
        if progress is not None:
            progress(done)
        return RemoteSchema(found["name"], done)
