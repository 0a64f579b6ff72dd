"""One road for all answers: a run's items become events, which are streamed, or folded into one
response.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ragfuse.engine.engine import Engine
from ragfuse.serve.completion_events import CompletionEvents
from ragfuse.serve.refusals import api_error_of
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.response_events import ResponseEvents
from ragfuse.serve.run import AnswerRequest, AnswerRun, Item
from ragfuse.serve.service import Service

Json = dict[str, Any]
Renderer = CompletionEvents | ResponseEvents
"""What writes the items of a run as events, and folds these into one response."""
MakeRequests = Callable[[Engine], Sequence[AnswerRequest]]
SLOW_S = 30.0
"""Seconds that a client may take to read a stream, beyond the time that the answer may take."""


async def respond(
    service: Service,
    request: Request,
    make: MakeRequests,
    render: Callable[[Engine], Renderer],
    streams: bool,
    session: str | None = None,
) -> Response:
    """Answer a request in its turn.

    Args:
        service: The service.
        request: The request.
        make: Returns the `AnswerRequest`s, in the request's turn.
        render: Returns what writes the events of the answers.
        streams: Whether the events are sent as they come.
        session: The conversation that the request continues.
    """
    run = await service.begin(tenant_of(request), make, session)
    try:
        renderer = render(run.engine)
        events = renderer.events(await _first_then(run.read()))
        if streams:
            return EventStream(events, renderer, run, service.settings.serve_timeout_s + SLOW_S)
        return JSONResponse(renderer.whole([event async for event in events]))
    except BaseException:
        run.cancel()
        raise


async def _first_then(items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    """Wait for the first item, so that an error before it is a response of its own; return all
    items.
    """
    first = await anext(items)

    async def all_items() -> AsyncIterator[Item]:
        yield first
        async for item in items:
            yield item

    return all_items()


class EventStream(StreamingResponse):
    """The server-sent events of a run, which is cancelled if the client disconnects or reads too
    slowly.
    """

    def __init__(
        self, events: AsyncIterator[Json], renderer: Renderer, run: AnswerRun, seconds: float
    ) -> None:
        self._run, self._seconds = run, seconds
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(_lines(events, renderer), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send all events."""
        try:
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            pass
        finally:
            self._run.cancel()


async def _lines(events: AsyncIterator[Json], renderer: Renderer) -> AsyncIterator[bytes]:
    """Yield the events as they are sent, an error as the last one."""
    try:
        async for event in events:
            yield _line(event)
        yield renderer.last
    except Exception as error:
        yield _line(renderer.failed(api_error_of(error)))


def _line(event: Json) -> bytes:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()
