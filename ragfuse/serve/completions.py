"""The routes of chat and text completions, and the plan of a request without its answer."""

from __future__ import annotations

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
from ragfuse.serve.run import AnswerRequest
from ragfuse.serve.schema import ChatRequest, CompletionRequest, ExplainRequest, TextRequest
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

    @routes.post("/v1/chat/completions", responses=EVENT_STREAM)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer chat messages."""
        return await _answer(
            service, request, body, lambda engine: chat_requests(body, engine.constraints.template)
        )

    @routes.post("/v1/completions", responses=EVENT_STREAM)
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        return await _answer(service, request, body, lambda _: text_requests(body))

    @routes.post("/v1/ragfuse/explain")
    async def explain(request: Request, body: ExplainRequest) -> dict[str, Any]:
        """Show what a request would read and compute, how long that would take, and why, without
        answering it.
        """
        return await service.work(
            tenant_of(request), lambda engine, _: _explain(engine, body), computes=False
        )

    return routes


async def _answer(
    service: Service, request: Request, body: CompletionRequest, make: MakeRequests
) -> Response:
    """Return the response with the answers to the `AnswerRequest`s that `make` returns."""
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise unusable("stream_options", "stream_options need stream: true; give both or neither.")
    transfer = _transfer_of(service, body, tenant_of(request).salt)
    if transfer is not None:
        make = _prefill_only(make, transfer)
    if body.ragfuse.token_trace:
        make = _with_token_trace(make)

    def render(engine: Engine) -> CompletionEvents:
        return CompletionEvents(
            body, service.model, f"fp_{engine.digest[:10]}", lambda id: engine.model.text([id])
        )

    return await respond(
        service, request, make, render, bool(body.stream), body.session_id, body.n or 1
    )


def _with_token_trace(make: MakeRequests) -> MakeRequests:
    return lambda engine: [replace(each, tokens=TokenRecorder()) for each in make(engine)]


def _transfer_of(service: Service, body: CompletionRequest, salt: str) -> PromptTransfer | None:
    """Return the transfer that a request asks for; None where it is to be answered here, APIError
    where it cannot.
    """
    params = body.kv_transfer_params or {}
    if params.get("do_remote_prefill"):
        raise unusable(
            FIELD,
            f"{FIELD} ask this server to decode what another one has prefilled, which it cannot."
            ' Send this to the engine that decodes; here ask {"do_remote_decode": true}.',
        )
    if not params.get("do_remote_decode"):
        return None
    if service.transfers is None:
        raise unusable(
            FIELD,
            f"{FIELD} ask this server to hand KV over, but it has no place for it. Start it with"
            " RAGFUSE_TRANSFER_URL set to a folder or URL that the engine that decodes reaches,"
            " too.",
        )
    for name in ("stream", "session_id"):
        if getattr(body, name):
            raise unusable(
                name,
                f"{name} cannot be used with {FIELD}: another engine writes the answer. Leave it"
                " out.",
            )
    return PromptTransfer(service.transfers, service.model, salt, service.settings.transfer_level)


def _prefill_only(make: MakeRequests, transfer: PromptTransfer) -> MakeRequests:
    """Return what makes the one request that prefills the prompt and writes a single token.

    How an answer is sampled and where it ends is for the engine that decodes. It raises APIError
    (400) where there are several answers to give.
    """

    def prefill(engine: Engine) -> list[AnswerRequest]:
        made = make(engine)
        if len(made) != 1:
            raise unusable(FIELD, f"{FIELD} needs one prompt and n: 1, found {len(made)} answers.")
        transfer.weights = sample_weights(engine.model.files)
        ask = made[0].ask
        choice = "none" if ask.tool_choice == "none" else "auto"
        ask = replace(ask, max_tokens=1, stop=(), options={}, grammar=None, tool_choice=choice)
        return [AnswerRequest(made[0].question, ask, transfer=transfer)]

    return prefill


def _explain(engine: Engine, body: ExplainRequest) -> dict[str, Any]:
    request = chat_requests(body, engine.constraints.template)[0]
    plan = engine.plan(request.question, request.ask)
    return {"object": "ragfuse.plan", **as_dict(plan), "words": in_words(plan, NOT_PREDICTED)}
