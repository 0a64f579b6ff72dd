"""Routes that register, list, show and remove a tenant's schemas (the PML documents that define prompt modules).

Schemas are received and stored as text: a schema's name is never used as a path on this machine, and a tenant sees
only its own schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from ragfuse.engine.encoder import Ingested
from ragfuse.engine.engine import Engine
from ragfuse.engine.schema_service import RegisteredSchema, StoredSchema, outline, parse_schema
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.guard import unless_gone
from ragfuse.serve.keys import APITenant
from ragfuse.serve.refusals import APIError
from ragfuse.serve.schema import SchemaRequest
from ragfuse.serve.service import Service

LONGEST_NAME = 256
"""Most characters of a schema's name."""


def schema_routes(service: Service) -> APIRouter:
    """Return the router of all schema routes."""
    routes = APIRouter(prefix="/v1/ragfuse/schemas", route_class=BodyRoute)

    @routes.post("")
    async def register(request: Request, body: SchemaRequest) -> dict[str, Any]:
        """Register a schema, and compute the KV of its modules that is not stored yet. Waits in the request queue."""
        most = service.settings.serve_schemas
        work = service.work(_tenant(request), lambda engine, check: _register(engine, _checked(body.pml), most, check))
        found = await unless_gone(request.receive, work)
        return _as_dict(found)

    @routes.get("")
    async def ls(request: Request) -> dict[str, Any]:
        """List the schemas of the client's tenant."""
        found = await unless_gone(request.receive, service.look(_tenant(request), lambda engine: engine.schemas.ls()))
        told = [{"name": i.name, "modules": i.modules, "scaffolds": i.scaffolds, "added": int(i.added)} for i in found]
        return {"object": "list", "data": [{"object": "ragfuse.schema", **each} for each in told]}

    @routes.get("/{name:path}")
    async def show(request: Request, name: str) -> dict[str, Any]:
        """Show a schema's text, and the positions of its modules."""
        return await unless_gone(request.receive, service.look(_tenant(request), lambda engine: _shown(engine, name)))

    @routes.delete("/{name:path}")
    async def remove(request: Request, name: str) -> dict[str, Any]:
        """Remove a schema, and its KV unless another schema of the tenant uses it."""
        work = service.look(_tenant(request), lambda engine: _removed(engine, name))
        nbytes = await unless_gone(request.receive, work)
        return {"object": "ragfuse.schema", "name": name, "deleted": True, "nbytes": nbytes}

    return routes


def _checked(pml: str) -> str:
    """Return the schema's text; APIError (400) where its name cannot be part of a URL path."""
    text = pml.removeprefix("\ufeff")
    name = parse_schema(text).name
    if len(name) > LONGEST_NAME or not name.isprintable() or not name.strip("./ "):
        raise APIError(
            400,
            f"A schema is called {name!r:.80}; wanted a name of at most {LONGEST_NAME} signs that can stand in a path.",
            "unusable",
            "pml",
        )
    return text


def _register(engine: Engine, pml: str, most: int, check: Callable[[Ingested], None]) -> RegisteredSchema:
    names = engine.schemas.names()
    if len(names) >= most and parse_schema(pml).name not in names:
        raise APIError(
            400, f"There are {len(names)} schemas; wanted at most {most}. Remove one first.", "too_many", "pml"
        )
    return engine.register(pml, check)


def _as_dict(found: RegisteredSchema) -> dict[str, Any]:
    done, layout = found.done, found.layout
    told = {"runs": done.chunks, "encoded": done.encoded, "tokens": done.tokens, "nbytes": done.nbytes}
    placed = {"positions": layout.n_positions, "notes": list(layout.notes)}
    return {"object": "ragfuse.schema", "name": found.name, **told, **placed}


def _shown(engine: Engine, name: str) -> dict[str, Any]:
    kept, per_token = _kept(engine, name), engine.model.nbytes_per_token
    layout = engine.schemas.laid_out(kept)
    n_tokens = sum(len(run.tokens) for run in layout.runs)
    told = {"name": kept.name, "pml": kept.pml, "added": int(kept.added), "positions": layout.n_positions}
    sizes = {"runs": len(layout.runs), "tokens": n_tokens, "nbytes_per_token": per_token}
    rows = list(outline(layout, per_token))
    return {"object": "ragfuse.schema", **told, **sizes, "parts": rows, "notes": list(layout.notes)}


def _removed(engine: Engine, name: str) -> int:
    return engine.schemas.remove(_kept(engine, name).name)


def _kept(engine: Engine, name: str) -> StoredSchema:
    found = engine.schemas.get(name)
    if found is None:
        wanted = engine.schemas.names_told()
        raise APIError(404, f"There is no schema '{name:.80}'; wanted {wanted}.", "schema_not_found", "name")
    return found


def _tenant(request: Request) -> APITenant:
    tenant: APITenant = request.state.tenant
    return tenant
