"""The route class: bodies are read within the limits and parsed on a thread of their own, so that
none delays others; work ends once its client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_state import unless_disconnected
from ragfuse.settings import Settings

DRAIN_FACTOR = 8
"""A body over the limit is read up to this many times the limit, as its sender reads the error only
after sending.
"""


class ParsedRequest(Request):
    """A request whose body is already parsed and validated; FastAPI gets the result from `json`."""

    def __init__(self, request: Request, value: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return a placeholder, so that FastAPI asks for `json`; the original bytes are freed."""
        return b"{}"

    async def json(self) -> Any:
        """Return the validated body."""
        return self._value


class BodyRoute(APIRoute):
    """A route whose handler is cancelled once the client disconnects.

    A body is JSON within the limits of the settings, parsed on the intake thread.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that reads the body, if any, then calls FastAPI's own handler."""
        handler = super().get_route_handler()
        model = next((each.field_info.annotation for each in self.dependant.body_params), None)

        async def handle(request: Request) -> Response:
            if model is None:
                return await unless_disconnected(request.receive, handler(request))
            service = request.app.state.service
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":  # which no web page elsewhere may send unasked
                raise APIError(
                    415,
                    f"Wanted a body of type application/json, found '{kind:.60}'.",
                    "content_type",
                )
            raw = [
                await _body(request, service.settings)
            ]  # popped, so that the bytes are freed once they are parsed
            body = await service.threads.run(
                service.threads.intake, lambda: model.model_validate_json(raw.pop())
            )
            return await unless_disconnected(request.receive, handler(ParsedRequest(request, body)))

        return handle


async def _body(request: Request, settings: Settings) -> bytes:
    """Return the whole body; APIError where it is too large or too slow."""
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
            408, f"The body did not arrive within {patience_s:g} seconds. Send it faster.", "slow"
        ) from None
    except ClientDisconnect:
        raise APIError(499, "The client closed the connection.", "gone") from None
    if max(n, n_told) > most:
        raise APIError(
            413, f"The body is larger than {most:,} bytes. Send less at once.", "too_large"
        )
    return bytes(body)
