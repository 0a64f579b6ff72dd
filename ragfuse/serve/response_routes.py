"""The routes of `/v1/responses`: answer, continue, fetch and delete responses."""

from __future__ import annotations

import logging
from asyncio import to_thread
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ragfuse.engine.engine import Engine
from ragfuse.errors import InputError, StoreError
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_state import tenant_of, token_counts_of, unless_disconnected
from ragfuse.serve.requests import chat_requests
from ragfuse.serve.response_items import chat_request_of, items_of
from ragfuse.serve.response_schema import InputItem, ResponseRequest
from ragfuse.serve.response_writer import ResponseEvents
from ragfuse.serve.routes import SLOW_S, Events, check_model, first_then, media_type_response
from ragfuse.serve.run import HARD_S, AnswerRequest, Completed
from ragfuse.serve.service import Service

log = logging.getLogger("ragfuse.serve")


def response_routes(service: Service) -> APIRouter:
    """Return the routes of responses."""
    routes, records = APIRouter(route_class=BodyRoute), service.responses

    @routes.post("/v1/responses", responses=media_type_response("text/event-stream"))
    async def respond(request: Request, body: ResponseRequest) -> Response:
        """Answer an input, as a new conversation or as the next turn of a stored response."""
        check_model(service, body.model)
        tenant, previous = tenant_of(request), body.previous_response_id
        before = await to_thread(records.conversation, tenant.salt, previous) if previous else []
        items = items_of(body)
        chat = chat_request_of(body, [*before, *items])
        writer = ResponseEvents(body, service.model)
        session = None
        if body.store is not False:
            session = await to_thread(records.session_after, tenant.salt, previous, writer.id)
        chat = chat.model_copy(update={"session_id": session})

        def make(engine: Engine) -> Sequence[AnswerRequest]:
            needs_template = chat.reasoning_effort is not None or chat.verbosity is not None
            return chat_requests(chat, engine.constraints.template if needs_template else None)

        async def keep(response: dict[str, Any]) -> None:
            if session is None:
                return
            output = [InputItem.model_validate(item) for item in response["output"]]
            try:
                await to_thread(records.add, tenant.salt, response, [*items, *output], previous, session)
            except StoreError as error:  # the answer is there all the same
                log.error("A response was answered, but not stored: %s", error)
                response["store"] = False

        run = await unless_disconnected(request.receive, service.begin(tenant, make, session))
        try:
            found = token_counts_of(request).counted(run.read())
            if body.stream:
                ready = await unless_disconnected(request.receive, first_then(found))
                seconds = service.settings.serve_timeout_s + HARD_S + SLOW_S
                return Events(writer.events(ready, keep), run, seconds)
            response = await unless_disconnected(request.receive, _whole(writer, found))
            await keep(response)
            return JSONResponse(response)
        except BaseException:
            run.cancel()
            raise

    @routes.get("/v1/responses/{id}")
    async def fetch(request: Request, id: str) -> dict[str, Any]:
        """Return a stored response."""
        return (await to_thread(records.get, tenant_of(request).salt, id)).response

    @routes.get("/v1/responses/{id}/input_items")
    async def input_items(request: Request, id: str) -> dict[str, Any]:
        """Return the input of a stored response, the last item first."""
        record = await to_thread(records.get, tenant_of(request).salt, id)
        n_output = len(record.response["output"])
        own = record.items[: len(record.items) - n_output]
        data = [_as_input(item) for item in reversed(own)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return {"object": "list", "data": data, "has_more": False, **ends}

    @routes.delete("/v1/responses/{id}")
    async def delete(request: Request, id: str) -> dict[str, Any]:
        """Delete a stored response, and with the last one of a conversation its session."""
        tenant = tenant_of(request)
        record = await to_thread(records.delete, tenant.salt, id)
        if not await to_thread(records.has_session, tenant.salt, record.session):
            await service.lookup(request, lambda engine: _forget(engine, record.session))
        return {"id": id, "object": "response", "deleted": True}

    return routes


async def _whole(writer: ResponseEvents, items: Any) -> dict[str, Any]:
    async for item in items:
        if isinstance(item, Completed):
            return writer.whole(item)
    raise APIError(500, "The answer did not end; the server's log has the details.", "internal")


def _forget(engine: Engine, session: str) -> None:
    try:
        engine.sessions.delete(session)
    except InputError:
        return  # it was never saved, or is deleted already


def _as_input(item: InputItem) -> dict[str, Any]:
    found = {name: value for name, value in item.model_dump().items() if value is not None}
    if isinstance(found.get("content"), str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": found["content"]}]
    return {"id": f"item_{uuid4().hex}", **found}
