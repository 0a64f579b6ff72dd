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
from ragfuse.engine.schema_service import RegisteredSchema, StoredSchema, outline, parse_schema
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
        done, layout = found.done, found.layout
        return {
            "object": "ragfuse.schema",
            "name": found.name,
            "runs": done.chunks,
            "encoded": done.encoded,
            "tokens": done.tokens,
            "nbytes": done.nbytes,
            "positions": layout.n_positions,
        }

    @routes.get("")
    async def ls(request: Request) -> dict[str, Any]:
        """List the schemas of the client's tenant."""
        found = await service.lookup(request, lambda engine: engine.schemas.ls())
        data = [
            {"object": "ragfuse.schema", "name": each.name, "added": int(each.added)}
            for each in found
        ]
        return {"object": "list", "data": data}

    @routes.get("/{name:path}")
    async def show(request: Request, name: str) -> dict[str, Any]:
        """Show a schema's text, and the positions of its modules."""
        return await service.lookup(request, lambda engine: _show(engine, name))

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


def _show(engine: Engine, name: str) -> dict[str, Any]:
    schema, per_token = _stored(engine, name), engine.model.nbytes_per_token
    layout = engine.schemas.laid_out(schema)
    return {
        "object": "ragfuse.schema",
        "name": schema.name,
        "pml": schema.pml,
        "added": int(schema.added),
        "positions": layout.n_positions,
        "runs": len(layout.runs),
        "tokens": sum(len(run.tokens) for run in layout.runs),
        "nbytes_per_token": per_token,
        "modules": outline(layout, per_token),
    }


def _stored(engine: Engine, name: str) -> StoredSchema:
    found = engine.schemas.get(name)
    if found is None:
        wanted = engine.schemas.describe_names()
        raise APIError(
            404, f"There is no schema '{name:.80}'; wanted {wanted}.", "schema_not_found", "name"
        )
    return found
