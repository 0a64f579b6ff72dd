"""Check requests (API key, Host header, body limits), count requests, and write the access log.

The middleware works at the ASGI level, so the body of a rejected request is not read. A log line
has method, path, status, tenant and time, but no key, question or document.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragfuse.serve.keys import LOOPBACK
from ragfuse.serve.refusals import APIError, refusal
from ragfuse.serve.service import Service
from ragfuse.settings import Settings

log = logging.getLogger("ragfuse.serve.access")

T = TypeVar("T")


async def unless_disconnected(
    receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]
) -> T:
    """Return the result of `work`; if the client leaves, cancel `work` and raise APIError (499)."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "The client closed the connection.", "gone")
    finally:
        for each in (task, disconnect):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


DRAIN_FACTOR = 8
"""Bodies are read up to this multiple of the limit, so that clients receive the error reply."""


class ParsedRequest(Request):
    """A request whose body is already validated. `json` returns the validated body."""

    def __init__(self, request: Request, value: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return a placeholder for the body, so that FastAPI calls `json()`."""
        return b"{}"

    async def json(self) -> Any:
        """Return the validated body."""
        return self._value


class BodyRoute(APIRoute):
    """A route whose handler is cancelled when the client disconnects.

    A request's body must be JSON within the configured limits. The intake thread parses the body.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that reads the body and then calls FastAPI's handler."""
        handler = super().get_route_handler()
        model = next((each.field_info.annotation for each in self.dependant.body_params), None)

        async def handle(request: Request) -> Response:
            if model is None:
                return await unless_disconnected(request.receive, handler(request))
            service = request.app.state.service
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            # across origins, browsers send this type only with CORS
            if kind != "application/json":
                raise APIError(
                    415,
                    f"The Content-Type must be application/json, found '{kind:.60}'.",
                    "content_type",
                )
            # popped, so that the bytes are freed after parsing
            raw = [await _body(request, service.settings)]
            body = await service.threads.run(
                service.threads.intake, lambda: model.model_validate_json(raw.pop())
            )
            return await unless_disconnected(request.receive, handler(ParsedRequest(request, body)))

        return handle


async def _body(request: Request, settings: Settings) -> bytes:
    """Return a request's body; APIError if the body is too large, too slow or incomplete."""
    most, patience_s = settings.serve_body_bytes, settings.serve_patience_s
    body, n = bytearray(), 0
    told = request.headers.get("content-length", "")
    n_told = int(told) if told.isdigit() else 0
    try:
        async with asyncio.timeout(patience_s):
            async for piece in request.stream():
                n += len(piece)
                if max(n, n_told) > DRAIN_FACTOR * most:
                    break
                body += piece if n <= most else b""
    except TimeoutError:
        raise APIError(
            408, f"The body did not arrive in {patience_s:g} seconds. Send the body faster.", "slow"
        ) from None
    except ClientDisconnect:
        raise APIError(499, "The client closed the connection.", "gone") from None
    if max(n, n_told) > most:
        raise APIError(
            413, f"The body is larger than {most:,} bytes. Send a smaller body.", "too_large"
        )
    return bytes(body)


PUBLIC = ("/health", "/", "/docs")
PAGE_FILES = "/page/"
"""Path prefix of the web page's files. A request for such a file needs no API key."""
QUIET = ("/health", "/metrics")
"""Paths whose requests are logged at level DEBUG."""


class Guard:
    """ASGI middleware that checks each request and puts the key's tenant into the request's state.

    Args:
        app: The ASGI app that handles the accepted requests.
        service: State shared by all routes.
        loopback_only: True to accept only loopback names in the Host header. This check prevents
            DNS rebinding.
    """

    def __init__(self, app: ASGIApp, service: Service, loopback_only: bool) -> None:
        self._app, self._service, self._loopback_only = app, service, loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, forward the request to the app, and count and log the outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, told, path = time.monotonic(), "not answered", scope["path"]
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal told
            if message["type"] == "http.response.start":
                told = f"{message['status']} cut off"
                route = getattr(scope.get("route"), "path", "other")
                self._service.requests.labels(route, str(message["status"])).inc()
            elif not message.get("more_body"):
                told = told.removesuffix(" cut off")
            await send(message)

        try:
            self._admit(Request(scope, receive))
            await self._app(scope, receive, noted)
        except APIError as error:
            await refusal(error)(scope, receive, noted)
        finally:
            tenant = state.get("tenant")
            log.log(
                logging.DEBUG if path in QUIET else logging.INFO,
                "%s %s %s, %s, %.0f ms",
                scope["method"],
                quote(path, safe="/:@-._~")[:120],
                told,
                f"tenant {tenant.name}" if tenant is not None and tenant.name else "no tenant",
                1000 * (time.monotonic() - began_s),
            )

    def _admit(self, request: Request) -> None:
        path, headers = request.scope["path"], request.headers
        # A request without a Host header is not from a browser: browsers send the resolved name.
        host = headers.get("host")
        if self._loopback_only and host is not None:
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name.strip("[]").lower() not in LOOPBACK:
                raise APIError(
                    421,
                    "Without API keys, this server accepts only localhost or 127.0.0.1 in the"
                    " Host header. Use one of these names, or start the server with API keys.",
                    "host",
                )
        tenant = self._service.keys.tenant(headers.get("authorization"))
        if tenant is None and path not in PUBLIC and not path.startswith(PAGE_FILES):
            raise APIError(
                401,
                "This server needs an API key. Send 'Authorization: Bearer KEY'. If the server"
                " lists the key as 'SALT:KEY', send only KEY.",
                "api_key",
            )
        request.state.tenant = tenant
