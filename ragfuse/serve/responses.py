"""The routes of `/v1/responses`: answer, continue, fetch and delete responses."""

from __future__ import annotations

import logging
from asyncio import to_thread
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragfuse.engine.engine import Engine
from ragfuse.errors import NoSessionError, StoreError
from ragfuse.serve.answers import EVENT_STREAM, respond
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.requests import chat_requests
from ragfuse.serve.response_events import ResponseEvents
from ragfuse.serve.response_items import chat_request_of, items_of
from ragfuse.serve.response_schema import ITEMS, ResponseRequest
from ragfuse.serve.service import Service

log = logging.getLogger("ragfuse.serve")


def response_routes(service: Service) -> APIRouter:
    """Return the routes of responses."""
    routes, records = APIRouter(route_class=BodyRoute), service.responses

    @routes.post("/v1/responses", responses=EVENT_STREAM)
    async def answer(request: Request, body: ResponseRequest) -> Response:
        """Answer an input, as a new conversation or as the next turn of a stored response."""
        service.check_model(body.model)
        salt, previous, id = (
            tenant_of(request).salt,
            body.previous_response_id,
            f"resp_{uuid4().hex}",
        )
        before = await to_thread(records.conversation, salt, previous) if previous else []
        items = items_of(body)
        session = None
        if body.store is not False:
            session = await to_thread(records.session_after, salt, previous, id)
        chat = chat_request_of(body, [*before, *items], session)

        async def keep(response: dict[str, Any]) -> None:
            if session is None:
                return
            try:
                await to_thread(
                    records.add,
                    salt,
                    response,
                    [*items, *ITEMS.validate_python(response["output"])],
                    previous,
                    session,
                )
            except StoreError as error:  # the answer is there all the same
                log.error("A response was answered, but not stored: %s", error)
                response["store"] = False

        return await respond(
            service,
            request,
            lambda engine: chat_requests(chat, engine.constraints.template),
            lambda engine: ResponseEvents(body, service.model, id, keep),
            bool(body.stream),
            session,
        )

    @routes.get("/v1/responses/{id}")
    async def fetch(request: Request, id: str) -> dict[str, Any]:
        """Return a stored response."""
        return (await to_thread(records.get, tenant_of(request).salt, id)).response

    @routes.get("/v1/responses/{id}/input_items")
    async def input_items(request: Request, id: str) -> dict[str, Any]:
        """Return the input of a stored response, the last item first."""
        record = await to_thread(records.get, tenant_of(request).salt, id)
        own = record.items[: len(record.items) - len(record.response["output"])]
        data = [
            {"id": f"item_{uuid4().hex}", **each.model_dump(exclude_none=True)}
            for each in reversed(own)
        ]
        return {
            "object": "list",
            "data": data,
            "has_more": False,
            "first_id": data[0]["id"],
            "last_id": data[-1]["id"],
        }

    @routes.delete("/v1/responses/{id}")
    async def delete(request: Request, id: str) -> dict[str, Any]:
        """Delete a stored response, and with the last one of a conversation its session."""
        session = await to_thread(records.delete, tenant_of(request).salt, id)
        if session is not None:
            await service.lookup(request, lambda engine: _forget(engine, session))
        return {"id": id, "object": "response", "deleted": True}

    return routes


def _forget(engine: Engine, session: str) -> None:
    try:
        engine.sessions.delete(session)
    except NoSessionError:
        return  # it was never saved, or is deleted already
