"""One log line for each request: method, path, status, tenant, time, tokens. Never a key, a question or a document."""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import quote

from ragfuse.serve.guard import App, Message, Receive, Scope, Send
from ragfuse.serve.request_state import TokenCounts

log = logging.getLogger("ragfuse.serve.access")

MAX_PATH_CHARS = 120
"""Most characters of a path in a line."""
QUIET = ("/health", "/metrics")
"""Paths that programs ask again and again; their lines have the level DEBUG."""


class AccessLog:
    """ASGI middleware around the guard that logs a line when a request has ended.

    Args:
        app: The guarded app.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and log it; lifespan events are not logged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.monotonic(), 0
        state = scope.setdefault("state", {})
        state["token_counts"] = counts = TokenCounts()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", _line(scope, state, status, time.monotonic() - began_s, counts))


def _line(scope: Scope, state: dict[str, Any], status: int, seconds: float, counts: TokenCounts) -> str:
    """Return the line, such as "POST /v1/completions 200, tenant 1f0c22ab, 812 ms, 949 + 32 tokens"."""
    path = quote(scope["path"], safe="/:@-._~")[:MAX_PATH_CHARS]
    tenant = state.get("tenant")
    parts = [f"{scope['method']} {path} {status or 'not answered'}"]
    parts += [f"tenant {tenant.name}" if tenant.name else "no tenant"] if tenant is not None else []
    parts += [f"{1000 * seconds:.0f} ms"]
    parts += [f"{counts.prompt} + {counts.answer} tokens"] if counts.prompt or counts.answer else []
    return ", ".join(parts)
