"""The routes of chat and text completions, and the plan of a request without its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragfuse.engine.engine import Engine
from ragfuse.plan.explanation import as_dict, in_words
from ragfuse.serve.answers import EVENT_STREAM, MakeRequests, respond
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.completion_events import CompletionEvents
from ragfuse.serve.refusals import unusable
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.requests import chat_requests, text_requests
from ragfuse.serve.schema import ChatRequest, CompletionRequest, ExplainRequest, TextRequest
from ragfuse.serve.service import Service
from ragfuse.serve.token_trace import TokenRecorder
from ragfuse.serve.transfer import transfer_of

NOT_PREDICTED = "Times are not predicted: the server's machine was not measured with this model and its tiers."
"""What an explained plan says instead of times; how to measure is told to whoever starts the server."""


def completion_routes(service: Service) -> APIRouter:
    """Return the routes of completions."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/chat/completions", responses=EVENT_STREAM)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer chat messages."""
        return await _answer(service, request, body, lambda engine: chat_requests(body, engine.constraints.template))

    @routes.post("/v1/completions", responses=EVENT_STREAM)
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        return await _answer(service, request, body, lambda engine: text_requests(body, len(engine.model.tokenizer)))

    @routes.post("/v1/ragfuse/explain")
    async def explain(request: Request, body: ExplainRequest) -> dict[str, Any]:
        """Show what a request would read and compute, how long that would take, and why, without answering it."""
        return await service.work_for(request, lambda engine, check: _explain(engine, body, check), computes=False)

    return routes


async def _answer(service: Service, request: Request, body: CompletionRequest, make: MakeRequests) -> Response:
    """Return the response with the answers to the `AnswerRequest`s that `make` returns."""
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise unusable("stream_options", "stream_options need stream: true; give both or neither.")
    transfer = transfer_of(body, service, tenant_of(request).salt)
    if transfer is not None:
        make = transfer.instead_of(make)
    if body.ragfuse.token_trace:
        make = _with_token_trace(make)

    def render(engine: Engine) -> CompletionEvents:
        return CompletionEvents(body, service.model, f"fp_{engine.digest[:10]}", lambda id: engine.model.text([id]))

    return await respond(service, request, make, render, bool(body.stream), body.session_id, body.n or 1)


def _with_token_trace(make: MakeRequests) -> MakeRequests:
    return lambda engine: [replace(each, tokens=TokenRecorder()) for each in make(engine)]


def _explain(engine: Engine, body: ExplainRequest, check: Callable[[object], None]) -> dict[str, Any]:
    check(None)
    if body.prompt is None:
        request = chat_requests(body, engine.constraints.template)[0]
    elif body.messages:
        raise unusable("messages", "Give either messages or prompt, found both.")
    else:
        fields = body.model_dump(include=TextRequest.model_fields.keys() - {"logprobs"}, exclude_unset=True)
        request = text_requests(TextRequest(**{**fields, "model": ""}), len(engine.model.tokenizer))[0]
    plan = engine.plan(request.question, request.ask)
    return {"object": "ragfuse.plan", **as_dict(plan), "words": in_words(plan, NOT_PREDICTED)}
