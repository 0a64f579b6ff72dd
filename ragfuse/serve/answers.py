"""HTTP routes for chat completions, text completions, responses, and load plans."""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ragfuse.engine.engine import Engine
from ragfuse.engine.request import PreparedPrompt
from ragfuse.errors import ModelError, NoSessionError, StoreError, TransferError
from ragfuse.plan.explanation import as_dict, in_words
from ragfuse.serve.events import CompletionEvents, ResponseEvents
from ragfuse.serve.guard import BodyRoute
from ragfuse.serve.keys import tenant_of
from ragfuse.serve.refusals import api_error_of, unusable
from ragfuse.serve.requests import chat_requests, text_requests, with_documents
from ragfuse.serve.run import AnswerRequest, AnswerRun, Item
from ragfuse.serve.schema import (
    INPUT,
    ChatRequest,
    CompletionRequest,
    RequestMessage,
    ResponseRequest,
    TextRequest,
    chat_request_of,
)
from ragfuse.serve.service import Service
from ragfuse.transfer import TransferHandle, TransferModel, TransferPlace, sample_weights

log = logging.getLogger("ragfuse.serve")

Json = dict[str, Any]
FIELD = "kv_transfer_params"
Renderer = CompletionEvents | ResponseEvents
"""Converts the items of an `AnswerRun` to events, and the events to a whole response."""
NOT_PREDICTED = (
    "Times are not predicted: this server has no timings of this model and the store's tiers."
)
SLOW_S = 30.0
"""Seconds that a client may take to read a stream, in addition to `serve_timeout_s`."""


async def respond(
    service: Service,
    request: Request,
    make: Callable[[Engine], Sequence[AnswerRequest]],
    render: Callable[[Engine], Renderer],
    streams: bool,
    session: str | None = None,
) -> Response:
    """Wait for a request's turn in the queue, generate the answers, and return the HTTP response.

    Args:
        service: State shared by all routes.
        request: The HTTP request.
        make: Returns one `AnswerRequest` per answer. Called in a thread when the request joins the
            queue, even if the request must still wait for its turn.
        render: Returns the object that converts answers to events.
        streams: True to stream the events. False to send the whole response at the end.
        session: Name of the conversation that the request continues, or None.
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
    """Wait for the first item, so that an error before that item has its own HTTP status."""
    first = await anext(items)

    async def all_items() -> AsyncIterator[Item]:
        yield first
        async for item in items:
            yield item

    return all_items()


class EventStream(StreamingResponse):
    """A response of server-sent events. Generation stops if the client leaves or is too slow."""

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
    """Yield each event as server-sent event lines. An exception becomes the final event."""
    try:
        async for event in events:
            yield _line(event)
        yield renderer.last
    except Exception as error:
        yield _line(renderer.failed(api_error_of(error)))


def _line(event: Json) -> bytes:
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


def answer_routes(service: Service) -> APIRouter:
    """Return the routes of completions and responses."""
    routes, records = APIRouter(route_class=BodyRoute), service.responses

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer chat messages."""
        return await _answer(service, request, body, lambda: chat_requests(body))

    @routes.post("/v1/completions")
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue one or more texts."""
        return await _answer(service, request, body, lambda: text_requests(body))

    @routes.post("/v1/ragfuse/explain")
    async def explain(request: Request, body: ChatRequest) -> dict[str, Any]:
        """Return a request's load plan, predicted times and reasons. No answer is generated."""
        return await service.work(tenant_of(request), lambda engine, _: _explain(engine, body))

    @routes.post("/v1/responses")
    async def answer(request: Request, body: ResponseRequest) -> Response:
        """Answer an input. The input starts a conversation, or continues a previous response."""
        service.check_model(body.model)
        salt, id, before = tenant_of(request).salt, f"resp_{uuid4().hex}", list[RequestMessage]()
        session = id
        if body.previous_response_id:
            found = await to_thread(records.get, salt, body.previous_response_id)
            before, session = found.messages, found.session
        # includes the documents, so that later turns have the documents, too
        messages = [*before, *with_documents(body.input, body.documents)]
        is_stored = body.store is not False
        chat = chat_request_of(body, messages, session if is_stored else None)

        async def keep(response: dict[str, Any]) -> None:
            if not is_stored:
                return
            whole = [*messages, *INPUT.validate_python(response["output"])]
            try:
                await to_thread(records.add, salt, response, whole, session)
            except StoreError as error:  # the client gets the answer nevertheless
                log.error("A response was sent, but not stored: %s", error)
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
        """Delete a stored response, and the session if no other response belongs to the session."""
        session = await to_thread(records.delete, tenant_of(request).salt, id)
        if session is not None:
            with suppress(NoSessionError):  # never saved, or already deleted
                await service.lookup(request, lambda engine: engine.sessions.delete(session))
        return {"id": id, "object": "response", "deleted": True}

    return routes


async def _answer(
    service: Service,
    request: Request,
    body: CompletionRequest,
    make: Callable[[], Sequence[AnswerRequest]],
) -> Response:
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise unusable("stream_options", "stream_options need stream: true. Send both or neither.")
    salt = tenant_of(request).salt

    def made(engine: Engine) -> Sequence[AnswerRequest]:
        found = make()
        if body.kv_transfer_params:
            found = [_prefill_only(service, salt, engine, body, found)]
        if body.ragfuse.token_trace:
            found = [replace(each, traces_tokens=True) for each in found]
        return found

    return await respond(
        service,
        request,
        made,
        lambda engine: CompletionEvents(body, service.model, engine),
        bool(body.stream),
        body.session_id,
    )


def _prefill_only(
    service: Service,
    salt: str,
    engine: Engine,
    body: CompletionRequest,
    made: Sequence[AnswerRequest],
) -> AnswerRequest:
    """Return a prefill-only request; another engine decodes. APIError (400) if unsupported."""
    if service.transfers is None:
        raise unusable(
            FIELD,
            f"{FIELD} needs RAGFUSE_TRANSFER_URL on the server: storage that both engines reach.",
        )
    params, (request, *others) = body.kv_transfer_params or {}, made
    if not params.get("do_remote_decode") or others or body.stream or body.session_id:
        raise unusable(
            FIELD,
            f'{FIELD} needs {{"do_remote_decode": true}}, one prompt and n: 1. Remove stream and'
            " session_id: another engine decodes the answer.",
        )
    weights = sample_weights(engine.model.files)
    choice = "none" if request.ask.tool_choice == "none" else "auto"
    return AnswerRequest(
        request.question,
        replace(request.ask, max_tokens=1, stop=(), options={}, grammar=None, tool_choice=choice),
        transfer=partial(_hand_over, service.transfers, service, salt, weights),
    )


def _hand_over(
    place: TransferPlace, service: Service, salt: str, weights: str, prepared: PreparedPrompt
) -> dict[str, Any]:
    """Store a prefilled prompt's KV for the decoding engine; return `kv_transfer_params`."""
    prefill = prepared.prefill
    positions, ids = prefill.positions, tuple(prefill.token_ids)
    if positions is not None and positions.tolist() != list(range(len(ids))):
        raise unusable(
            FIELD,
            "The decoding engine cannot use this prompt, because a PML prompt's positions have"
            f" gaps. Remove {FIELD}, or send the prompt without pml.",
        )
    try:
        kv = prefill.kv
        model = TransferModel.of(service.model, kv)
    except (ModelError, TransferError) as error:
        raise unusable(FIELD, f"{error} Remove {FIELD}.") from error
    label, level = TransferHandle.tenant_label(salt), service.settings.transfer_level
    handle = place.put(kv, ids, model, label, level, weights)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": handle.place,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "prompt_token_ids": list(ids),
        "ragfuse": handle.as_dict(),
    }


def _explain(engine: Engine, body: ChatRequest) -> dict[str, Any]:
    request = chat_requests(body)[0]
    plan = engine.plan(request.question, request.ask)
    return {"object": "ragfuse.plan", **as_dict(plan), "words": in_words(plan, NOT_PREDICTED)}
