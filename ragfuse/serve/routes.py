"""The HTTP routes: chat and text completions, models, store, explain, health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from ragfuse.engine.ask import Ask
from ragfuse.engine.constraints import offered_tools
from ragfuse.engine.engine import Engine
from ragfuse.plan.explanation import as_dict, in_words
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.logprobs import TokenLogprob
from ragfuse.serve.refusals import APIError
from ragfuse.serve.replies import ResponseWriter
from ragfuse.serve.request_state import tenant_of, token_counts_of, unless_disconnected
from ragfuse.serve.requests import chat_requests, question_of, text_requests
from ragfuse.serve.run import HARD_S, AnswerRequest, AnswerRun, Completed, TextDelta
from ragfuse.serve.schema import ChatRequest, CompletionRequest, ExplainRequest, TextRequest, TokensRequest
from ragfuse.serve.service import Service
from ragfuse.serve.stats import store_of
from ragfuse.serve.token_trace import TokenRecorder
from ragfuse.serve.transfer import transfer_of

T = TypeVar("T")
MakeRequests = Callable[[Engine], Sequence[AnswerRequest]]
NOT_PREDICTED = "Times are not predicted: the server's machine was not measured with this model and its tiers."
"""What an explained plan says instead of times; how to measure is told to whoever starts the server."""
SLOW_S = 30.0
"""Seconds that a client may take to read a stream, beyond the time that the answer may take."""


def router(service: Service) -> APIRouter:
    """Return the routes of a service."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/chat/completions", responses=media_type_response("text/event-stream"))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer chat messages."""

        def make(engine: Engine) -> list[AnswerRequest]:
            template_fields = body.chat_template_kwargs, body.enable_thinking, body.reasoning_effort, body.verbosity
            template = engine.constraints.template if any(each is not None for each in template_fields) else None
            return chat_requests(body, template)

        return await _answer(service, request, body, make, True, bool(body.logprobs))

    @routes.post("/v1/completions", responses=media_type_response("text/event-stream"))
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""

        def make(engine: Engine) -> list[AnswerRequest]:
            return text_requests(body, len(engine.model.tokenizer))

        return await _answer(service, request, body, make, False, body.logprobs is not None)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model that answers, under each of its names, and the embedder."""
        names = (*service.names, service.embedder.name)
        return {"object": "list", "data": [_model_card(service, name) for name in dict.fromkeys(names)]}

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe the model of this name."""
        if model == service.embedder.name:
            return _model_card(service, model)
        check_model(service, model)
        return _model_card(service, model if model in service.names else service.model)

    @routes.get("/v1/ragfuse/model")
    async def card(request: Request) -> dict[str, Any]:
        """Show what a client needs to know of the model: its window, whether it has a chat template, its refusal."""
        found = await service.lookup(request, lambda engine: asdict(engine.card))
        return {"object": "ragfuse.model", **found, "name": service.model}

    @routes.post("/v1/ragfuse/tokens")
    async def tokens(request: Request, body: TokensRequest) -> dict[str, Any]:
        """Return the token ids of a text in the middle of a prompt, or of the whole prompt that messages make."""
        return {
            "object": "ragfuse.tokens",
            "tokens": await service.lookup(request, lambda engine: _tokens(engine, body)),
        }

    @routes.get("/v1/ragfuse/store")
    async def store(request: Request) -> dict[str, Any]:
        """Show the client's tenant's entries in the store, by tier."""
        return await service.lookup(request, store_of)

    @routes.post("/v1/ragfuse/explain")
    async def explain(request: Request, body: ExplainRequest) -> dict[str, Any]:
        """Show what a request would read and compute, how long that would take, and why, without answering it."""
        return await service.work_for(request, lambda engine, check: _explain(engine, body, check), computes=False)

    @routes.get("/health")
    async def health() -> Response:
        """Report whether the server accepts requests."""
        payload = {"status": "stopping" if service.stopping else "ok", "model": service.model}
        return JSONResponse(payload, 503 if service.stopping else 200)

    @routes.get("/metrics", responses=media_type_response("text/plain"))
    async def metrics(request: Request) -> Response:
        """Report Prometheus metrics of all requests and of the client's tenant."""
        threads = service.threads
        text = await threads.run(threads.control, service.counts.text, tenant_of(request).salt)
        return Response(text, media_type="text/plain; version=0.0.4")

    return routes


async def _answer(
    service: Service,
    request: Request,
    body: CompletionRequest,
    make: MakeRequests,
    is_chat: bool,
    wants_logprobs: bool,
) -> Response:
    """Return the response with the answers to the `AnswerRequest`s that `make` returns."""
    check_model(service, body.model)
    if body.stream_options is not None and not body.stream:
        raise APIError(400, "stream_options need stream: true; give both or neither.", "unusable", "stream_options")
    tenant = tenant_of(request)
    if body.ragfuse.token_trace:
        make = _with_token_trace(make)
    level = service.settings.transfer_level
    transfer = transfer_of(body, service.transfers, service.model, tenant.salt, level)
    if transfer is not None:
        make, wants_logprobs = transfer.instead_of(make), False
    run = await unless_disconnected(request.receive, service.begin(tenant, make, body.session_id))
    try:
        engine = run.engine
        usage = body.stream_options is not None and body.stream_options.include_usage
        writer = ResponseWriter(
            service.model,
            is_chat,
            f"fp_{engine.digest[:10]}",
            lambda id: engine.model.text([id]),
            wants_logprobs,
            usage,
            body.ragfuse.token_ids,
            body.n or 1,
        )
        items = token_counts_of(request).counted(run.read(), body.n or 1)
        if not body.stream:
            return JSONResponse(await unless_disconnected(request.receive, _whole(writer, items)))
        ready = await unless_disconnected(request.receive, first_then(items))
        return Events(writer.events(ready), run, service.settings.serve_timeout_s + HARD_S + SLOW_S)
    except BaseException:
        run.cancel()
        raise


def _with_token_trace(make: MakeRequests) -> MakeRequests:
    return lambda engine: [replace(each, tokens=TokenRecorder()) for each in make(engine)]


async def _whole(writer: ResponseWriter, items: AsyncIterator[TextDelta | Completed]) -> dict[str, Any]:
    completed: list[Completed] = []
    token_logprobs: dict[int, list[TokenLogprob]] = {}
    async for item in items:
        token_logprobs.setdefault(item.index, []).extend(item.token_logprobs)
        if isinstance(item, Completed):
            completed.append(item)
    return writer.whole(completed, token_logprobs)


async def first_then(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wait for the first item, so that an error before it is still a response of its own; return all items."""
    return _prepend(await anext(items), items)


async def _prepend(first: T, items: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in items:
        yield item


class Events(Response):
    """The server-sent events of a run, which is cancelled if the client disconnects or reads too slowly."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], run: AnswerRun, seconds: float) -> None:
        self._events, self._run, self._seconds = events, run, seconds
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self.raw_headers = [each for each in self.raw_headers if each[0] != b"content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send all events."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._seconds):
                await unless_disconnected(receive, self._all(send))
        except (TimeoutError, APIError):
            pass
        finally:
            self._run.cancel()

    async def _all(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _explain(engine: Engine, body: ExplainRequest, check: Callable[[object], None]) -> dict[str, Any]:
    check(None)
    if body.prompt is None:
        request = chat_requests(body, engine.constraints.template)[0]
    elif body.messages:
        raise APIError(400, "Give either messages or prompt, found both.", "unusable", "messages")
    else:
        fields = body.model_dump(include=TextRequest.model_fields.keys() - {"logprobs"}, exclude_unset=True)
        request = text_requests(TextRequest(**{**fields, "model": ""}), len(engine.model.tokenizer))[0]
    check(None)
    plan = engine.plan(request.question, request.ask)
    check(None)
    return {"object": "ragfuse.plan", **as_dict(plan), "words": in_words(plan, NOT_PREDICTED)}


def _tokens(engine: Engine, body: TokensRequest) -> list[int]:
    is_text = body.text is not None
    if is_text is (body.messages is not None or body.pml is not None):
        raise APIError(400, "Give either text, or messages or pml; found both or neither.", "unusable", "text")
    if body.text is not None:
        return engine.tokens(body.text, body.special)
    question = question_of(body.pml, body.messages or ())
    ask = Ask(tools=body.tools or ())
    return [*engine.prompt(question, offered_tools(ask)).token_ids]


def media_type_response(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return an OpenAPI response entry for a route that may answer with text of this media type."""
    return {200: {"description": "The text.", "content": {kind: {"schema": {"type": "string"}}}}}


def check_model(service: Service, name: str) -> None:
    """Raise APIError (404) for a model that this server does not have."""
    if name not in service.names and (service.settings.served_model_name or name != service.settings.model):
        names = ", ".join(f"'{each}'" for each in service.names)
        raise APIError(
            404, f"This server has the model {names}, not '{name:.80}'. Ask for that one.", "model_not_found", "model"
        )


def _model_card(service: Service, name: str) -> dict[str, Any]:
    alias = {"root": service.model} if name in service.names[1:] else {}
    return {"id": name, "object": "model", "created": service.since, "owned_by": "ragfuse", **alias}
