"""The ASGI app: all routes behind the guard, with errors in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ragfuse.errors import RagFuseError
from ragfuse.serve.completions import completion_routes
from ragfuse.serve.document_routes import document_routes
from ragfuse.serve.embeddings import embedding_routes
from ragfuse.serve.guard import Guard
from ragfuse.serve.health import health_routes
from ragfuse.serve.models import model_routes
from ragfuse.serve.page_routes import page_routes
from ragfuse.serve.refusals import APIError, api_error_of, refusal
from ragfuse.serve.responses import response_routes
from ragfuse.serve.schemas import schema_routes
from ragfuse.serve.service import Service
from ragfuse.serve.stored import store_routes


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
        responses={status: {"description": "An error."} for status in ("4XX", "5XX")},
    )
    app.state.service = service
    for routes in (
        completion_routes,
        response_routes,
        embedding_routes,
        model_routes,
        document_routes,
        schema_routes,
        store_routes,
        health_routes,
    ):
        app.include_router(routes(service))
    app.include_router(page_routes())
    for kind in (
        APIError,
        RagFuseError,
        RequestValidationError,
        ValidationError,
        HTTPException,
        Exception,
    ):
        app.add_exception_handler(kind, _error_response)
    guarded = Guard(app, service, loopback_only and not len(service.keys))
    return CORSMiddleware(
        guarded, list(origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
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
    return refusal(api_error_of(error))
