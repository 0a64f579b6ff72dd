"""The ASGI app: all routes behind the guard, with health, metrics and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ragfuse.errors import RagFuseError
from ragfuse.serve.answers import completion_routes, response_routes
from ragfuse.serve.documents import document_routes
from ragfuse.serve.guard import Guard
from ragfuse.serve.keys import tenant_of
from ragfuse.serve.models import embedding_routes, model_routes
from ragfuse.serve.refusals import APIError, api_error_of, refusal
from ragfuse.serve.service import Service
from ragfuse.serve.stored import schema_routes, store_routes


def health_routes(service: Service) -> APIRouter:
    """Return the routes of health and metrics."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server accepts requests; while it stops there is no connection."""
        return {"status": "ok", "model": service.model}

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Report Prometheus metrics of all requests and of the client's tenant."""
        salt = tenant_of(request).salt
        text = await service.threads.run(
            service.threads.control, lambda: service.metrics.text(salt)
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    return routes


FOLDER = Path(__file__).parent / "page"
HEADERS = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
)
"""Headers of each file: only files and routes of this server, no inline script, no frame around the
page.
"""


def page_routes() -> APIRouter:
    """Return the routes of both pages and of their files."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page() -> FileResponse:
        """Show the page to try ragfuse on."""
        return _file("index.html")

    @routes.get("/docs")
    async def api_page() -> FileResponse:
        """Show all routes with their fields."""
        return _file("docs.html")

    @routes.get("/page/{name}")
    async def page_file(name: str) -> FileResponse:
        """Return a file of the pages."""
        return _file(name)

    return routes


def _file(name: str) -> FileResponse:
    if not (FOLDER / name).is_file():
        raise APIError(404, f"The page has no file '{name:.80}'.", "http")
    return FileResponse(FOLDER / name, headers=HEADERS)


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
