"""The routes of chat and text completions, and the plan of a request without its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragfuse.engine.engine import Engine
from ragfuse.plan.explanation import as_dict, in_words
from ragfuse.serve.answers import respond
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.completion_events import CompletionEvents
from ragfuse.serve.refusals import unusable
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.requests import chat_requests, text_requests
from ragfuse.serve.run import AnswerRequest
from ragfuse.serve.schema import ChatRequest, CompletionRequest, TextRequest
from ragfuse.serve.service import Service
from ragfuse.serve.token_trace import TokenRecorder
from ragfuse.serve.transfer import FIELD, PromptTransfer
from ragfuse.transfer import sample_weights

NOT_PREDICTED = (
    "Times are not predicted: the server's machine was not measured with this model and its tiers."
)
"""What an explained plan says instead of times; how to measure is told to whoever starts the
server.
"""


def completion_routes(service: Service) -> APIRouter:
    """Return the routes of completions."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer chat messages."""
        return await _answer(service, request, body, lambda: chat_requests(body))

    @routes.post("/v1/completions")
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        return await _answer(service, request, body, lambda: text_requests(body))

    @routes.post("/v1/ragfuse/explain")
    async def explain(request: Request, body: ChatRequest) -> dict[str, Any]:
        """Show what a request would read and compute, how long that would take, and why, without
        answering it.
        """
        return await service.work(tenant_of(request), lambda engine, _: _explain(engine, body))

    return routes


async def _answer(
    service: Service,
    request: Request,
    body: CompletionRequest,
    make: Callable[[], Sequence[AnswerRequest]],
) -> Response:
    """Return the response with the answers to the `AnswerRequest`s that `make` returns."""
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise unusable("stream_options", "stream_options need stream: true; give both or neither.")
    salt = tenant_of(request).salt

    def made(engine: Engine) -> Sequence[AnswerRequest]:
        found = make()
        if body.kv_transfer_params:
            found = [_prefill_only(service, salt, engine, body, found)]
        if body.ragfuse.token_trace:
            found = [replace(each, tokens=TokenRecorder()) for each in found]
        return found

    def render(engine: Engine) -> CompletionEvents:
        return CompletionEvents(
            body, service.model, f"fp_{engine.digest[:10]}", lambda id: engine.model.text([id])
        )

    return await respond(service, request, made, render, bool(body.stream), body.session_id)


def _prefill_only(
    service: Service,
    salt: str,
    engine: Engine,
    body: CompletionRequest,
    made: Sequence[AnswerRequest],
) -> AnswerRequest:
    """Return the one request that prefills the prompt and writes a single token, so that another
    engine decodes; APIError (400) where that cannot be done.

    How an answer is sampled and where it ends is for the engine that decodes.
    """
    if service.transfers is None:
        raise unusable(
            FIELD,
            f"{FIELD} ask this server to hand KV over, but it has no place for it. Start it with"
            " RAGFUSE_TRANSFER_URL set to a folder or URL that the engine that decodes reaches,"
            " too.",
        )
    params, (request, *others) = body.kv_transfer_params or {}, made
    if not params.get("do_remote_decode") or others or body.stream or body.session_id:
        raise unusable(
            FIELD,
            f'{FIELD} takes {{"do_remote_decode": true}} of a request with one prompt and n: 1,'
            " without stream and session_id: this server prefills it, another engine decodes it.",
        )
    weights, level = sample_weights(engine.model.files), service.settings.transfer_level
    choice = "none" if request.ask.tool_choice == "none" else "auto"
    return AnswerRequest(
        request.question,
        replace(request.ask, max_tokens=1, stop=(), options={}, grammar=None, tool_choice=choice),
        transfer=PromptTransfer(service.transfers, service.model, salt, level, weights),
    )


def _explain(engine: Engine, body: ChatRequest) -> dict[str, Any]:
    request = chat_requests(body)[0]
    plan = engine.plan(request.question, request.ask)
    return {"object": "ragfuse.plan", **as_dict(plan), "words": in_words(plan, NOT_PREDICTED)}
