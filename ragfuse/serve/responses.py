"""The routes of `/v1/responses`: answer, continue, fetch and delete responses."""

from __future__ import annotations

import logging
from asyncio import to_thread
from contextlib import suppress
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragfuse.errors import NoSessionError, StoreError
from ragfuse.serve.answers import respond
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.requests import chat_requests, with_documents
from ragfuse.serve.response_events import ResponseEvents
from ragfuse.serve.response_schema import INPUT, ResponseRequest, chat_request_of
from ragfuse.serve.schema import RequestMessage
from ragfuse.serve.service import Service

log = logging.getLogger("ragfuse.serve")


def response_routes(service: Service) -> APIRouter:
    """Return the routes of responses."""
    routes, records = APIRouter(route_class=BodyRoute), service.responses

    @routes.post("/v1/responses")
    async def answer(request: Request, body: ResponseRequest) -> Response:
        """Answer an input, as a new conversation or as the next turn of a stored response."""
        service.check_model(body.model)
        salt, id, before = tenant_of(request).salt, f"resp_{uuid4().hex}", list[RequestMessage]()
        session = id
        if body.previous_response_id:
            found = await to_thread(records.get, salt, body.previous_response_id)
            before, session = found.messages, found.session
        # with the documents, so that later turns have them too
        messages = [*before, *with_documents(body.input, body.documents)]
        is_stored = body.store is not False
        chat = chat_request_of(body, messages, session if is_stored else None)

        async def keep(response: dict[str, Any]) -> None:
            if not is_stored:
                return
            whole = [*messages, *INPUT.validate_python(response["output"])]
            try:
                await to_thread(records.add, salt, response, whole, session)
            except StoreError as error:  # the answer is there all the same
                log.error("A response was answered, but not stored: %s", error)
                response["store"] = False

        return await respond(
            service,
            request,
            lambda _: chat_requests(chat),
            lambda engine: ResponseEvents(body, service.model, id, keep),
            bool(body.stream),
            chat.session_id,
        )

    @routes.get("/v1/responses/{id}")
    async def fetch(request: Request, id: str) -> dict[str, Any]:
        """Return a stored response."""
        return (await to_thread(records.get, tenant_of(request).salt, id)).response

    @routes.delete("/v1/responses/{id}")
    async def delete(request: Request, id: str) -> dict[str, Any]:
        """Delete a stored response, and with the last one of a conversation its session."""
        session = await to_thread(records.delete, tenant_of(request).salt, id)
        if session is not None:
            with suppress(NoSessionError):  # it was never saved, or is deleted already
                await service.lookup(request, lambda engine: engine.sessions.delete(session))
        return {"id": id, "object": "response", "deleted": True}

    return routes
