"""The one middleware: API key and tenant, host, the count of responses, a line in the log.

It works at the ASGI level, so that nothing of a refused request is read. A line has method, path,
status, tenant and time; never a key, a question or a document.
"""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragfuse.serve.keys import LOOPBACK
from ragfuse.serve.refusals import APIError, refusal
from ragfuse.serve.service import Service

log = logging.getLogger("ragfuse.serve.access")

PUBLIC = ("/health", "/", "/docs")
"""Paths that need no key."""
PAGE_FILES = "/page/"
"""Where the paths of the web page's files begin, which need no key either: they hold no data."""
QUIET = ("/health", "/metrics")
"""Paths whose lines have the level DEBUG."""


class Guard:
    """Checks each request, and puts its tenant into the request's state.

    Args:
        app: The app that answers the requests that pass.
        service: The service.
        loopback_only: Accept only loopback names in the Host header, so that no web page reaches a
            server without keys by DNS rebinding.
    """

    def __init__(self, app: ASGIApp, service: Service, loopback_only: bool) -> None:
        self._app, self._service, self._loopback_only = app, service, loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, count and log one request; lifespan events pass unchecked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status, path = time.monotonic(), 0, scope["path"]
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._service.metrics.count(getattr(scope.get("route"), "path", "other"), status)
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
                status or "not answered",
                f"tenant {tenant.name}" if tenant is not None and tenant.name else "no tenant",
                1000 * (time.monotonic() - began_s),
            )

    def _admit(self, request: Request) -> None:
        path, headers = request.scope["path"], request.headers
        # a monitor that sends none is no browser: they all send the name that was resolved
        host = headers.get("host")
        if self._loopback_only and host is not None:
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name.strip("[]").lower() not in LOOPBACK:
                raise APIError(
                    421,
                    "Without API keys, this server accepts only localhost or 127.0.0.1 in the Host"
                    " header. Use that name, or start the server with API keys.",
                    "host",
                )
        tenant = self._service.keys.tenant(headers.get("authorization"))
        if tenant is None and path not in PUBLIC and not path.startswith(PAGE_FILES):
            raise APIError(
                401,
                "Wanted one of the server's API keys. Send it as 'Bearer KEY', without its salt.",
                "api_key",
            )
        request.state.tenant = tenant
