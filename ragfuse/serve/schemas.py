"""Routes that register, list, show and remove a tenant's schemas (the PML documents that define
prompt modules).

Schemas are received and stored as text: a schema's name is never used as a path on this machine,
and a tenant sees only its own schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from ragfuse.engine.engine import Engine
from ragfuse.engine.schema_service import RegisteredSchema
from ragfuse.schemas.pml import parse_schema
from ragfuse.schemas.registry import StoredSchema
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.schema import SchemaRequest
from ragfuse.serve.service import Service


def schema_routes(service: Service) -> APIRouter:
    """Return the router of all schema routes."""
    routes = APIRouter(prefix="/v1/ragfuse/schemas", route_class=BodyRoute)

    @routes.post("")
    async def register(request: Request, body: SchemaRequest) -> dict[str, Any]:
        """Register a schema, and compute the KV of its modules that is not stored yet. Waits in the
        request queue.
        """
        most = service.settings.serve_schemas
        found = await service.work(
            tenant_of(request), lambda engine, check: _register(engine, body.pml, most, check)
        )
        done = found.done
        return {
            "object": "ragfuse.schema",
            "name": found.name,
            "runs": done.chunks,
            "encoded": done.encoded,
            "tokens": done.tokens,
            "nbytes": done.nbytes,
        }

    @routes.get("")
    async def ls(request: Request) -> dict[str, Any]:
        """List the schemas of the client's tenant."""
        found = await service.lookup(request, lambda engine: engine.schemas.ls())
        return {"object": "list", "data": list(map(_told, found))}

    @routes.get("/{name:path}")
    async def show(request: Request, name: str) -> dict[str, Any]:
        """Show a schema's text."""
        found = await service.lookup(request, lambda engine: _stored(engine, name))
        return {**_told(found), "pml": found.pml}

    @routes.delete("/{name:path}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        """Remove a schema, and its KV unless another schema of the tenant uses it."""
        nbytes = await service.lookup(
            request, lambda engine: engine.schemas.remove(_stored(engine, name).name)
        )
        return {"object": "ragfuse.schema", "name": name, "deleted": True, "nbytes": nbytes}

    return routes


def _register(
    engine: Engine, pml: str, most: int, check: Callable[[object], None]
) -> RegisteredSchema:
    text, names = pml.removeprefix("\ufeff"), engine.schemas.names()
    name = parse_schema(text).name  # refuses what the engine would take for the name of a file
    if len(names) >= most and name not in names:
        told = f"There are {len(names)} schemas already, of at most {most}. Remove one first."
        raise APIError(400, told, "too_many", "pml")
    return engine.schemas.register(text, check)


def _stored(engine: Engine, name: str) -> StoredSchema:
    found = engine.schemas.get(name)
    if found is None:
        wanted = engine.schemas.describe_names()
        raise APIError(
            404, f"There is no schema '{name:.80}'; wanted {wanted}.", "schema_not_found", "name"
        )
    return found


def _told(schema: StoredSchema) -> dict[str, Any]:
    return {"object": "ragfuse.schema", "name": schema.name, "added": int(schema.added)}
