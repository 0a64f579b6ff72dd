"""The HTTP server: its routes, the checks by `Guard`, and a shutdown that saves all KV."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ragfuse.errors import RagFuseError
from ragfuse.process.jobs import release_pool
from ragfuse.serve.answers import answer_routes
from ragfuse.serve.documents import document_routes
from ragfuse.serve.guard import Guard
from ragfuse.serve.keys import LOOPBACK, tenant_of
from ragfuse.serve.listener import bound
from ragfuse.serve.models import model_routes
from ragfuse.serve.refusals import APIError, api_error_of, refusal
from ragfuse.serve.service import Service
from ragfuse.serve.stored import store_routes


def own_routes(service: Service) -> APIRouter:
    """Return the routes of health, metrics, and the web pages' files."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server accepts requests."""
        return {"status": "ok", "model": service.model}

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Report Prometheus metrics of all requests, and of the engine of the client's tenant."""
        tenant = tenant_of(request)
        text = await service.threads.run(
            service.threads.control, lambda: service.metrics_of(tenant)
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    @routes.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        """Return the demo page."""
        return _file("index.html")

    @routes.get("/docs", include_in_schema=False)
    async def api_page() -> FileResponse:
        """Return the API's documentation page."""
        return _file("docs.html")

    @routes.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> FileResponse:
        """Return a script, style sheet or other file of the web pages."""
        return _file(name)

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
"""HTTP headers of the web pages. They forbid inline scripts, other origins' content, and frames."""


def _file(name: str) -> FileResponse:
    if not (FOLDER / name).is_file():
        raise APIError(404, f"The page has no file '{name:.80}'.", "http")
    return FileResponse(FOLDER / name, headers=HEADERS)


def make_app(service: Service, origins: Sequence[str], loopback_only: bool) -> Any:
    """Return the ASGI app of a service.

    Args:
        service: State shared by all routes.
        origins: Origins of web pages that may call the server (CORS).
        loopback_only: True if only this machine can reach the server. Without API keys, `Guard`
            then accepts only loopback names in the Host header.
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
    for routes in (answer_routes, model_routes, document_routes, store_routes, own_routes):
        app.include_router(routes(service))
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
    """Run the service's background work while the app is up; save all KV at the end."""
    asyncio.get_running_loop().set_default_executor(service.threads.turns)
    upkeep = asyncio.create_task(service.upkeep())
    try:
        yield
    finally:
        upkeep.cancel()
        service.queue.stop()
        service.cancel()
        await asyncio.to_thread(service.close)
        service.threads.close()


async def _error_response(request: Request, error: Exception) -> Response:
    return refusal(api_error_of(error))


SWITCH_S = 0.0001
"""Python's thread switch interval in seconds; short, so that health checks respond quickly."""
TOKENIZER_WARMUP_WORDS = 8192
"""Number of words in the warm-up text. A text of this length starts the tokenizer's threads."""
AFTER_S = 5
"""Seconds after `serve_grace_s` in which connections may still close."""
POLL_S = 0.1
"""Seconds between checks for a second signal."""


class Server(uvicorn.Server):
    """A uvicorn server. After SIGTERM or Ctrl-C it finishes running answers and saves all KV.

    Waiting requests are rejected. Running answers are cut off after `serve_grace_s` seconds, or
    when a second signal arrives.

    Args:
        service: State shared by all routes.
        origins: Origins of web pages that may call the server (CORS).
        host: Address on which the sockets passed to `run` listen.
        tell: Called with a message when the shutdown begins, and when the shutdown is complete.
    """

    def __init__(
        self,
        service: Service,
        origins: Sequence[str] = (),
        host: str = "127.0.0.1",
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        settings = service.settings
        self._service, self._tell, self._is_hasty = service, tell, False
        config = uvicorn.Config(
            make_app(service, origins, host in LOOPBACK),
            ws="none",
            limit_concurrency=4 * (settings.serve_together + settings.serve_waiting) + 256,
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(settings.serve_grace_s) + AFTER_S,
        )
        super().__init__(config)

    def stop(self) -> None:
        """Shut down as on SIGTERM. A second call aborts running requests."""
        self._is_hasty = self.should_exit
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown when a signal arrives. A second signal aborts running requests."""
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running answers to end, then close all connections."""
        self._service.queue.stop()
        grace_s = self._service.settings.serve_grace_s
        n = len(self._service.queue.running)
        self._tell(f"Stopping: {n:,} running, cut off after {grace_s:g} s or at a second signal.")
        cutting = asyncio.create_task(self._cut_off(grace_s))
        await super().shutdown(sockets)
        cutting.cancel()
        self._tell("Stopped.")

    async def _cut_off(self, grace_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not self._is_hasty:
                    await asyncio.sleep(POLL_S)
        self._service.cancel()


def serve(
    service: Service,
    host: str,
    port: int,
    origins: Sequence[str],
    ready: Callable[[str], object],
    tell: Callable[[str], object],
) -> None:
    """Serve until a signal stops the server.

    Args:
        service: State shared by all routes.
        host: Address to listen on.
        port: Port to listen on. 0 means any free port.
        origins: Origins of web pages that may call the server (CORS).
        ready: Called with the server's URL once the model is loaded.
        tell: Called with a message when the shutdown begins, and when the shutdown is complete.

    Raises:
        SettingsError: The address is not available.
    """
    with contextlib.closing(bound(host, port)) as listener:
        engine = service.engine(service.keys.tenants[0])
        # The tokenizer's threads inherit the priority of the thread that first uses the tokenizer.
        # An answering thread has a lower priority than the event loop, so use that thread.
        service.threads.turns.submit(engine.tokens, "a " * TOKENIZER_WARMUP_WORDS).result()
        release_pool()
        gc.collect()
        gc.freeze()  # garbage collection of loaded objects would pause all requests
        sys.setswitchinterval(SWITCH_S)
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listener.getsockname()[1]}/v1")
        Server(service, origins, host, tell).run([listener])
