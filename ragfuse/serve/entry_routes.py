"""Routes over what the store keeps for the client's tenant: entries, usage, sessions."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field

from ragfuse.serve.body import BodyRoute
from ragfuse.serve.entries import Selection, StoredChunks, delete, pin, use_of
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.schema import RequestBody
from ragfuse.serve.service import Service

T = TypeVar("T")
MAX_ROWS = 1000
"""Most rows of one listing."""
MAX_KEYS = 1000
"""Most keys of one selection."""
MAX_SOURCE_CHARS = 4096
"""Most characters of a source."""
KeyBeginning = Annotated[str, Field(min_length=8, max_length=128)]


class SelectionBody(RequestBody):
    """The chunks to pin or unpin: `keys` (or their beginnings), those of one `source`, or `all` of the tenant."""

    keys: Annotated[list[KeyBeginning], Field(fail_fast=True)] = Field(default=[], max_length=MAX_KEYS)
    source: str | None = Field(default=None, max_length=MAX_SOURCE_CHARS)
    all: bool = False

    def selection(self) -> Selection:
        """Return the selection; APIError (400) unless exactly one condition is given."""
        return Selection(self.keys, self.source, self.all).checked()


def entry_routes(service: Service) -> APIRouter:
    """Return the routes of entries, usage and sessions."""
    routes = APIRouter(prefix="/v1/ragfuse", route_class=BodyRoute)

    @routes.get("/entries")
    async def entries(
        request: Request,
        source: Annotated[str | None, Query(max_length=MAX_SOURCE_CHARS)] = None,
        exact: bool = False,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 100,
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
    ) -> dict[str, Any]:
        """List the stored chunks of the client's tenant, most recently used first.

        With `source` those with a source that contains it, in any case; with `exact` those with just this source.
        """
        rows = await service.lookup(request, lambda engine: StoredChunks.of(engine).rows(source, exact))
        return {"object": "list", "data": rows[offset : offset + limit], "total": len(rows)}

    @routes.post("/entries/pin")
    async def pin_entries(request: Request, body: SelectionBody) -> dict[str, Any]:
        """Protect chunks from eviction, in every tier that has them."""
        selection = body.selection()
        n = await service.lookup(request, lambda engine: pin(engine, selection, True))
        return {"object": "ragfuse.pinned", "chunks": n, "pinned": True}

    @routes.post("/entries/unpin")
    async def unpin_entries(request: Request, body: SelectionBody) -> dict[str, Any]:
        """Allow chunks to be evicted again."""
        selection = body.selection()
        n = await service.lookup(request, lambda engine: pin(engine, selection, False))
        return {"object": "ragfuse.pinned", "chunks": n, "pinned": False}

    @routes.delete("/entries")
    async def delete_entries(
        request: Request,
        key: Annotated[list[KeyBeginning], Query(max_length=MAX_KEYS)] = [],  # noqa: B006 - FastAPI copies it
        source: Annotated[str | None, Query(max_length=MAX_SOURCE_CHARS)] = None,
        all: bool = False,
    ) -> dict[str, Any]:
        """Delete chunks of the client's tenant from every tier: by key, by source, or all."""
        selection = Selection(key, source, all).checked()
        return await service.lookup(request, lambda engine: delete(engine, selection))

    @routes.get("/usage")
    async def usage(request: Request) -> dict[str, Any]:
        """Show what the client's tenant keeps, by tier and by source, and its limits."""
        tenant = tenant_of(request)
        return await service.lookup(request, lambda engine: use_of(service.quotas[tenant.salt], engine))

    @routes.get("/live")
    async def live(request: Request) -> dict[str, Any]:
        """Show requests that run and wait, and what the client's tenant reused in the last hour."""
        tenant = tenant_of(request)
        return await service.lookup(request, lambda _: service.live(tenant))

    @routes.get("/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        """List the stored conversations of the client's tenant, most recently used first."""
        found = await service.lookup(request, lambda engine: engine.sessions.ls()[:MAX_ROWS])
        rows = [
            {
                "object": "ragfuse.session",
                "id": each.id,
                "turns": each.turns,
                "tokens": each.tokens,
                "used": each.used,
                "persistent": each.persistent,
            }
            for each in found
        ]
        return {"object": "list", "data": rows}

    @routes.delete("/sessions/{id:path}")
    async def delete_session(request: Request, id: str) -> dict[str, Any]:
        """Delete a stored conversation, and the KV that no other one uses."""
        done = await service.lookup(request, lambda engine: engine.sessions.delete(id))
        silent = {"silent": list(done.silent)} if done.silent else {}  # tiers that may still have some of its KV
        return {"object": "ragfuse.session", "id": id, "deleted": True, "nbytes": done.nbytes, **silent}

    return routes
