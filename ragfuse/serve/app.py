"""The ASGI app: all routes behind the guard, with errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ragfuse.errors import RagFuseError
from ragfuse.serve.access_log import AccessLog
from ragfuse.serve.document_routes import document_routes
from ragfuse.serve.embeddings import embedding_routes
from ragfuse.serve.entry_routes import entry_routes
from ragfuse.serve.guard import Guard
from ragfuse.serve.page_routes import page_routes
from ragfuse.serve.refusals import APIError, api_error_of, unreadable
from ragfuse.serve.response_routes import response_routes
from ragfuse.serve.routes import router
from ragfuse.serve.schema import ErrorBody
from ragfuse.serve.schema_routes import schema_routes
from ragfuse.serve.service import Service

STATUSES = (
    (400, "The request cannot be answered as it is."),
    (401, "The API key is missing or unknown."),
    (404, "No such model, schema or path."),
    (405, "The path has other methods."),
    (408, "The body came too slowly."),
    (413, "The body is too large."),
    (415, "The content type is not application/json."),
    (421, "The Host header is not a name of this server."),
    (429, "Too many requests wait already; Retry-After says when to retry."),
    (503, "The server is stopping, or its store cannot be used."),
    (504, "The answer did not begin in time."),
)
"""The status codes of errors, with their descriptions in the OpenAPI document."""


def make_app(service: Service, origins: Sequence[str] = (), loopback_only: bool = True) -> Any:
    """Return the ASGI app of a service.

    Args:
        service: The service.
        origins: Origins of web pages that may call the server from a browser (CORS).
        loopback_only: Whether the server listens on a loopback address only.
    """
    error_responses: dict[int | str, dict[str, Any]] = {
        status: {"description": description, "model": ErrorBody} for status, description in STATUSES
    }
    app = FastAPI(
        title="ragfuse",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _open(service),
        responses=error_responses,
        dependencies=[Depends(_known_parameters)],
    )
    routers = (
        router(service),
        schema_routes(service),
        response_routes(service),
        embedding_routes(service),
        entry_routes(service),
        document_routes(service),
        page_routes(),
    )
    for each in routers:
        app.include_router(each)
    app.state.threads = service.threads
    for kind in (APIError, RagFuseError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)
    app.openapi = lambda: _without_422(FastAPI.openapi(app))  # type: ignore[method-assign]
    settings = service.settings
    guarded = AccessLog(
        Guard(
            app,
            service.keys,
            service.max_body,
            settings.serve_patience_s,
            lambda: service.stopping,
            service.counts.count,
            loopback_only and not len(service.keys),
        )
    )
    return (
        CORSMiddleware(guarded, list(origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
        if origins
        else guarded
    )


@asynccontextmanager
async def _open(service: Service) -> AsyncIterator[None]:
    """Start the service's background work when the app starts; save everything when it ends."""
    asyncio.get_running_loop().set_default_executor(service.threads.turns)
    upkeep = asyncio.create_task(service.upkeep())
    try:
        yield
    finally:
        upkeep.cancel()
        service.stop()
        service.cancel()
        await asyncio.to_thread(service.close)
        service.threads.close()


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        api_error = unreadable(error.errors())
    elif isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path:.80}: {error.detail}. /docs lists what there is."
        api_error = APIError(error.status_code, what, "http")
        return Response(api_error.body(), error.status_code, error.headers, "application/json")
    else:
        api_error = api_error_of(error)
        if isinstance(error, RagFuseError) and api_error.param is None:
            api_error.param = error.argument or None
    return Response(api_error.body(), api_error.status, api_error.headers(), "application/json")


def _known_parameters(request: Request) -> None:
    """Refuse query parameters that a route of `/v1/ragfuse` does not have, as `sourc=` would delete all sources.

    OpenAI's own routes take none, and clients of other services may add theirs there.
    """
    route = request.scope.get("route")
    if not request.url.path.startswith("/v1/ragfuse/") or not isinstance(route, APIRoute):
        return
    known = [field.alias for field in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise APIError(400, f"There is no parameter '{name:.80}' here.", "unknown_parameter", name)


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    """Remove FastAPI's status 422 from the OpenAPI document: this server reports invalid requests as 400."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return document


def _version() -> str:
    try:
        return version("ragfuse-kv")
    except PackageNotFoundError:
        return "0"
