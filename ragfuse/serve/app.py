"""The ASGI app: all routes behind the guard, with errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ragfuse.errors import RagFuseError
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


def make_app(service: Service, origins: Sequence[str] = (), loopback_only: bool = True) -> Any:
    """Return the ASGI app of a service.

    Args:
        service: The service.
        origins: Origins of web pages that may call the server from a browser (CORS).
        loopback_only: Whether the server listens on a loopback address only.
    """
    app = FastAPI(
        title="ragfuse",
        version=version("ragfuse-kv"),
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _open(service),
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    for routes in (
        router(service),
        schema_routes(service),
        response_routes(service),
        embedding_routes(service),
        entry_routes(service),
        document_routes(service),
        page_routes(),
    ):
        app.include_router(routes)
    app.state.threads = service.threads
    for kind in (APIError, RagFuseError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)
    guarded = Guard(app, service, loopback_only and not len(service.keys))
    if not origins:
        return guarded
    return CORSMiddleware(guarded, list(origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])


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
    headers: Mapping[str, str] = {}
    if isinstance(error, RequestValidationError):
        api_error = unreadable(error.errors())
    elif isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path:.80}: {error.detail}. /docs lists what there is."
        api_error, headers = APIError(error.status_code, what, "http"), error.headers or {}
    else:
        api_error = api_error_of(error)
        if isinstance(error, RagFuseError) and api_error.param is None:
            api_error.param = error.argument or None
    return Response(api_error.body(), api_error.status, {**headers, **api_error.headers()}, "application/json")
