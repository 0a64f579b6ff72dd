"""The routes of the model and the embedder: their names, what a client needs to know of the model,
token ids.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from ragfuse.engine.engine import Engine
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.refusals import unusable
from ragfuse.serve.requests import question_of
from ragfuse.serve.schema import TokensRequest
from ragfuse.serve.service import Service


def model_routes(service: Service) -> APIRouter:
    """Return the routes /v1/models, /v1/ragfuse/model and /v1/ragfuse/tokens."""
    routes = APIRouter(route_class=BodyRoute)

    def told(name: str) -> dict[str, Any]:
        since = service.since
        return {"id": name, "object": "model", "created": since, "owned_by": "ragfuse"}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model that answers, under each of its names, and the embedder."""
        names = dict.fromkeys((*service.names, service.embedder.name))
        return {"object": "list", "data": [told(name) for name in names]}

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe the model of this name."""
        if model != service.embedder.name:
            service.check_model(model)
        return told(model)

    @routes.get("/v1/ragfuse/model")
    async def card(request: Request) -> dict[str, Any]:
        """Show what a client needs to know of the model: its window, whether it has a chat
        template, its refusal.
        """
        found = await service.lookup(request, lambda engine: asdict(engine.card))
        return {"object": "ragfuse.model", **found, "name": service.model}

    @routes.post("/v1/ragfuse/tokens")
    async def tokens(request: Request, body: TokensRequest) -> dict[str, Any]:
        """Return the token ids of a text in the middle of a prompt, or of the whole prompt that
        messages make.
        """
        ids = await service.lookup(request, lambda engine: _tokens(engine, body))
        return {"object": "ragfuse.tokens", "tokens": ids}

    return routes


def _tokens(engine: Engine, body: TokensRequest) -> list[int]:
    if (body.text is not None) is (body.messages is not None or body.pml is not None):
        raise unusable("text", "Give either text, or messages or pml; found both or neither.")
    if body.text is not None:
        return engine.tokens(body.text, body.special)
    question = question_of(body.pml, body.messages or ())
    return [*engine.prompt(question, body.tools or ()).token_ids]
