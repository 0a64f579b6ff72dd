"""HTTP routes that show and delete a tenant's stored data: entries, conversations, schemas.

A tenant's model digest includes the tenant's salt. Only entries with the digest of the client's
tenant are listed or deleted. A schema's name is never used as a file path.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Set
from typing import Any

from fastapi import APIRouter, Request

from ragfuse.engine.engine import Engine
from ragfuse.engine.schema_service import RegisteredSchema
from ragfuse.schemas.pml import parse_schema
from ragfuse.schemas.registry import StoredSchema
from ragfuse.serve.guard import BodyRoute
from ragfuse.serve.keys import tenant_of
from ragfuse.serve.refusals import APIError, unusable
from ragfuse.serve.request_queue import RETRY_S
from ragfuse.serve.schema import SchemaRequest
from ragfuse.serve.service import Service, limits_of
from ragfuse.store.deletion import (
    Chunk,
    chunk_of,
    forget_chunks,
    leave_source,
    sources_in_order,
    texts_by_chunk,
)
from ragfuse.store.tier import totals
from ragfuse.telemetry.metrics import TTFT_S
from ragfuse.types.keys import token_digest
from ragfuse.types.kv import Entry


def store_routes(service: Service) -> APIRouter:
    """Return the routes of entries, sessions and schemas, and of the server's current load."""
    routes = APIRouter(prefix="/v1/ragfuse", route_class=BodyRoute)

    @routes.get("/store")
    async def store(request: Request) -> dict[str, Any]:
        """Show the tenant's stored data by tier and by source, and the tenant's limits."""
        parts = len(service.keys.tenants)
        return await service.lookup(request, lambda engine: _use_of(engine, parts))

    @routes.get("/live")
    async def live(request: Request) -> dict[str, Any]:
        """Show how many requests run, how many wait, and the tenant's reuse since server start."""
        counts = await service.lookup(request, lambda engine: engine.counters.now())
        queue = service.queue
        return {
            "object": "ragfuse.live",
            "running": len(queue.running),
            "waiting": len(queue),
            "counts": dict(counts.sums),
            "ttft": counts.ttft,
            "ttft_bounds_s": TTFT_S,
        }

    @routes.delete("/entries")
    async def delete_entries(
        request: Request, source: str | None = None, all: bool = False
    ) -> dict[str, Any]:
        """Delete the tenant's chunks from every tier: all chunks, or the chunks of one source."""
        if (source is not None) is all:
            raise unusable("source", "Send exactly one of source and all.")
        return await service.lookup(request, lambda engine: delete(engine, source))

    @routes.get("/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        """List the stored conversations of the client's tenant, most recently used first."""
        found = await service.lookup(request, lambda engine: engine.sessions.ls())
        names = ("id", "turns", "tokens", "used", "persistent")
        rows = [
            {"object": "ragfuse.session", **{name: getattr(each, name) for name in names}}
            for each in found
        ]
        return {"object": "list", "data": rows}

    @routes.delete("/sessions/{id:path}")
    async def delete_session(request: Request, id: str) -> dict[str, Any]:
        """Delete a stored conversation, and its KV unless another conversation uses the KV."""
        done = await service.lookup(request, lambda engine: engine.sessions.delete(id))
        # tiers that may still store KV of the conversation
        silent = {"silent": list(done.silent)} if done.silent else {}
        return {
            "object": "ragfuse.session",
            "id": id,
            "deleted": True,
            "nbytes": done.nbytes,
            **silent,
        }

    @routes.post("/schemas")
    async def register(request: Request, body: SchemaRequest) -> dict[str, Any]:
        """Wait for a turn in the queue, then register a schema and encode its modules."""
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

    @routes.get("/schemas")
    async def schemas(request: Request) -> dict[str, Any]:
        """List the schemas of the client's tenant."""
        found = await service.lookup(request, lambda engine: engine.schemas.ls())
        return {"object": "list", "data": list(map(_told, found))}

    @routes.get("/schemas/{name:path}")
    async def schema(request: Request, name: str) -> dict[str, Any]:
        """Show the PML text of a schema."""
        found = await service.lookup(request, lambda engine: _stored(engine, name))
        return {**_told(found), "pml": found.pml}

    @routes.delete("/schemas/{name:path}")
    async def remove_schema(request: Request, name: str) -> dict[str, Any]:
        """Remove a schema, and its KV unless another schema of the tenant uses the KV."""
        nbytes = await service.lookup(
            request, lambda engine: engine.schemas.remove(_stored(engine, name).name)
        )
        return {"object": "ragfuse.schema", "name": name, "deleted": True, "nbytes": nbytes}

    return routes


def _use_of(engine: Engine, parts: int) -> dict[str, Any]:
    """Return a tenant's stored data by tier and by source, and the tenant's limits.

    Entries without a known text have the source "". The `nbytes` of a source counts KV in several
    tiers once. The `tiers` of a source counts every copy.
    """
    entries, catalog = _own(engine), engine.catalog
    known, by_source = texts_by_chunk(catalog, [engine.digest]), defaultdict(list)
    for entry in entries:
        texts = known[chunk_of(entry.key)]
        for source in sources_in_order(each.source for each in texts) or ("",):
            by_source[source].append(entry)
    sources = [
        {
            "source": source,
            **_sizes(mine),
            "chunks": len({chunk_of(entry.key) for entry in mine}),
            "hits": sum(entry.hits for entry in mine),
        }
        for source, mine in by_source.items()
    ]
    return {
        "object": "ragfuse.store",
        "tiers": totals(engine.store.tiers, entries),
        "waiting_to_be_encoded": engine.counters.waiting(),
        "texts": catalog.count_texts(engine.digest),
        "sessions": catalog.count_sessions(engine.digest),
        "limits": limits_of(engine, parts),
        "sources": sorted(sources, key=lambda each: -each["nbytes"]),
    }


def delete(engine: Engine, source: str | None) -> dict[str, Any]:
    """Delete the chunks and texts of a source. Return the number of chunks and bytes deleted.

    If `source` is None, all chunks are deleted. Chunks that also have another source are kept.

    Raises:
        APIError: A tier failed, so KV may still be stored there (503).
    """
    known = engine.catalog.texts(engine.digest)
    texts = {each.text for each in known if source in (None, each.source)}
    strict = engine.catalog.strict
    kept = leave_source(strict, engine.digest, texts, lambda each: source in (None, each))
    more = {chunk_of(entry.key) for entry in _own(engine)} if source is None else set()
    return {"object": "ragfuse.deleted", **freed(engine, texts - kept, more), "kept": len(kept)}


def freed(engine: Engine, texts: Collection[str], more: Set[Chunk] = frozenset()) -> dict[str, Any]:
    """Delete `texts` with their KV, and all chunks in `more`. Return what was deleted.

    Raises:
        APIError: A tier failed, so KV may still be stored there (503).
    """
    chunks = more | {(engine.digest, token_digest(engine.tokens(text))) for text in texts}
    done = forget_chunks(engine.store, engine.catalog.strict, chunks)
    engine.forget(texts)
    if done.silent:
        names = ", ".join(sorted(done.silent))
        text = f"A tier failed, so KV may still be stored in {names}. Repeat the request later."
        raise APIError(503, text, "store", None, RETRY_S)
    return {"chunks": len(chunks), **_sizes(done.entries)}


def _own(engine: Engine) -> list[Entry]:
    return [entry for entry in engine.store.entries() if entry.key.model == engine.digest]


def _sizes(entries: Collection[Entry]) -> dict[str, Any]:
    """Return `tiers` (bytes by tier) and `nbytes` (total; KV in several tiers counts once)."""
    tiers = Counter[str]()
    for entry in entries:
        tiers[entry.tier] += entry.nbytes
    ascending = sorted(entries, key=lambda entry: entry.nbytes)
    largest = {entry.key: entry.nbytes for entry in ascending}
    return {"nbytes": sum(largest.values()), "tiers": dict(tiers)}


def _register(
    engine: Engine, pml: str, most: int, check: Callable[[object], None]
) -> RegisteredSchema:
    text, names = pml.removeprefix("\ufeff"), engine.schemas.names()
    name = parse_schema(text).name  # rejects text that the engine would take for a file name
    if len(names) >= most and name not in names:
        told = f"There are {len(names)} schemas; the maximum is {most}. Remove a schema first."
        raise APIError(400, told, "too_many", "pml")
    return engine.schemas.register(text, check)


def _stored(engine: Engine, name: str) -> StoredSchema:
    found = engine.schemas.get(name)
    if found is None:
        wanted = engine.schemas.describe_names()
        raise APIError(
            404, f"There is no schema '{name:.80}'. Use {wanted}.", "schema_not_found", "name"
        )
    return found


def _told(schema: StoredSchema) -> dict[str, Any]:
    return {"object": "ragfuse.schema", "name": schema.name, "added": int(schema.added)}
