"""Routes that register, list, show and remove a tenant's schemas (the PML documents that define prompt modules).

Schemas are received and stored as text: a schema's name is never used as a path on this machine, and a tenant sees
only its own schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from ragfuse.engine.engine import Engine
from ragfuse.engine.schema_service import RegisteredSchema, StoredSchema, outline, parse_schema
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.refusals import APIError, unusable
from ragfuse.serve.schema import SchemaRequest
from ragfuse.serve.service import Service
from ragfuse.types.ingested import Ingested

MAX_NAME_CHARS = 256
"""Most characters of a schema's name."""


def schema_routes(service: Service) -> APIRouter:
    """Return the router of all schema routes."""
    routes = APIRouter(prefix="/v1/ragfuse/schemas", route_class=BodyRoute)

    @routes.post("")
    async def register(request: Request, body: SchemaRequest) -> dict[str, Any]:
        """Register a schema, and compute the KV of its modules that is not stored yet. Waits in the request queue."""
        max_schemas = service.settings.serve_schemas
        found = await service.work_for(
            request, lambda engine, check: _register(engine, _checked(body.pml), max_schemas, check)
        )
        return _as_dict(found)

    @routes.get("")
    async def ls(request: Request) -> dict[str, Any]:
        """List the schemas of the client's tenant."""
        found = await service.lookup(request, lambda engine: engine.schemas.ls())
        schemas = [
            {
                "object": "ragfuse.schema",
                "name": each.name,
                "modules": each.modules,
                "scaffolds": each.scaffolds,
                "added": int(each.added),
            }
            for each in found
        ]
        return {"object": "list", "data": schemas}

    @routes.get("/{name:path}")
    async def show(request: Request, name: str) -> dict[str, Any]:
        """Show a schema's text, and the positions of its modules."""
        return await service.lookup(request, lambda engine: _show(engine, name))

    @routes.delete("/{name:path}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        """Remove a schema, and its KV unless another schema of the tenant uses it."""
        nbytes = await service.lookup(request, lambda engine: _remove(engine, name))
        return {"object": "ragfuse.schema", "name": name, "deleted": True, "nbytes": nbytes}

    return routes


def _checked(pml: str) -> str:
    """Return the schema's text; APIError (400) where its name cannot be part of a URL path."""
    text = pml.removeprefix("\ufeff")
    name = parse_schema(text).name
    if len(name) > MAX_NAME_CHARS or not name.isprintable() or not name.strip("./ "):
        raise unusable(
            "pml",
            f"The schema's name is {name!r:.80}; wanted at most {MAX_NAME_CHARS} printable characters, not only dots, "
            "slashes and spaces.",
        )
    return text


def _register(engine: Engine, pml: str, max_schemas: int, check: Callable[[Ingested], None]) -> RegisteredSchema:
    names = engine.schemas.names()
    if len(names) >= max_schemas and parse_schema(pml).name not in names:
        raise APIError(
            400,
            f"There are {len(names)} schemas already, of at most {max_schemas}. Remove one first.",
            "too_many",
            "pml",
        )
    return engine.schemas.register(pml, check)


def _as_dict(found: RegisteredSchema) -> dict[str, Any]:
    done, layout = found.done, found.layout
    counts = {"runs": done.chunks, "encoded": done.encoded, "tokens": done.tokens, "nbytes": done.nbytes}
    layout_fields = {"positions": layout.n_positions, "notes": list(layout.notes)}
    return {"object": "ragfuse.schema", "name": found.name, **counts, **layout_fields}


def _show(engine: Engine, name: str) -> dict[str, Any]:
    schema, per_token = _stored_schema(engine, name), engine.model.nbytes_per_token
    layout = engine.schemas.laid_out(schema)
    n_tokens = sum(len(run.tokens) for run in layout.runs)
    fields = {"name": schema.name, "pml": schema.pml, "added": int(schema.added), "positions": layout.n_positions}
    sizes = {"runs": len(layout.runs), "tokens": n_tokens, "nbytes_per_token": per_token}
    parts = list(outline(layout, per_token))
    return {"object": "ragfuse.schema", **fields, **sizes, "parts": parts, "notes": list(layout.notes)}


def _remove(engine: Engine, name: str) -> int:
    return engine.schemas.remove(_stored_schema(engine, name).name)


def _stored_schema(engine: Engine, name: str) -> StoredSchema:
    found = engine.schemas.get(name)
    if found is None:
        wanted = engine.schemas.describe_names()
        raise APIError(404, f"There is no schema '{name:.80}'; wanted {wanted}.", "schema_not_found", "name")
    return found
