"""HTTP routes for the model and the embedder: names, limits, token ids and embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ragfuse.engine.engine import Engine
from ragfuse.models.embedder import Embedder
from ragfuse.serve.guard import BodyRoute
from ragfuse.serve.keys import tenant_of
from ragfuse.serve.refusals import APIError, unusable
from ragfuse.serve.requests import question_of
from ragfuse.serve.schema import RequestBody, TokensRequest
from ragfuse.serve.service import Service


def model_routes(service: Service) -> APIRouter:
    """Return the router of /v1/models, /v1/embeddings, and ragfuse's model and token routes."""
    routes, embedder = APIRouter(route_class=BodyRoute), service.embedder

    def told(name: str) -> dict[str, Any]:
        since = service.since
        return {"id": name, "object": "model", "created": since, "owned_by": "ragfuse"}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List every name of the model, and the embedder."""
        names = dict.fromkeys((*service.names, service.embedder.name))
        return {"object": "list", "data": [told(name) for name in names]}

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe the model or embedder with this name."""
        if model != service.embedder.name:
            service.check_model(model)
        return told(model)

    @routes.get("/v1/ragfuse/model")
    async def card(request: Request) -> dict[str, Any]:
        """Show the model's limits and chat template. If KV cannot be reused, show the reason."""
        found = await service.lookup(request, lambda engine: asdict(engine.card))
        return {"object": "ragfuse.model", **found, "name": service.model}

    @routes.post("/v1/ragfuse/tokens")
    async def tokens(request: Request, body: TokensRequest) -> dict[str, Any]:
        """Return the token ids of a text, or of the prompt built from messages."""
        ids = await service.lookup(request, lambda engine: _tokens(engine, body))
        return {"object": "ragfuse.tokens", "tokens": ids}

    @routes.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the embeddings of texts, after waiting for a turn in the request queue."""
        if body.model not in (embedder.name, service.settings.embedder):
            text = (
                f"This server has the embedder '{embedder.name}', not '{body.model:.80}'."
                " Change `model`."
            )
            raise APIError(404, text, "model_not_found", "model")
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors, n_tokens = await service.work(
            tenant_of(request), lambda _, check: _embed(embedder, texts, check)
        )
        is_packed = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": at,
                "embedding": (
                    base64.b64encode(each.astype("<f4").tobytes()).decode()
                    if is_packed
                    else each.tolist()
                ),
            }
            for at, each in enumerate(vectors)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "model": embedder.name, "data": data, "usage": usage}

    return routes


def _tokens(engine: Engine, body: TokensRequest) -> list[int]:
    if (body.text is not None) is (body.messages is not None or body.pml is not None):
        raise unusable("text", "Send either text or a prompt (messages, pml or both).")
    if body.text is not None:
        return engine.tokens(body.text, body.special)
    question = question_of(body.pml, body.messages or ())
    return [*engine.prompt(question, body.tools or ()).token_ids]


BATCH_TEXTS = 32
"""Number of texts embedded between two checks for cancellation."""
MAX_EMBEDDED = 2048
MAX_TEXT_CHARS = 65_536
EmbeddedText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]


class EmbeddingRequest(RequestBody):
    """The body of `/v1/embeddings`."""

    model: str
    input: (
        EmbeddedText
        | Annotated[
            list[EmbeddedText], Field(min_length=1, max_length=MAX_EMBEDDED, fail_fast=True)
        ]
    )
    """One or more texts. Token ids are rejected, because the embedder has its own tokenizer."""
    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = None


def _embed(
    embedder: Embedder, texts: Sequence[str], check: Callable[[object], None]
) -> tuple[list[Any], int]:
    """Return the embeddings and total tokens of texts; APIError (400) if a text is too long."""
    lengths, vectors = embedder.lengths(texts), list[Any]()
    if (longest := max(lengths)) > embedder.max_tokens:
        raise APIError(
            400,
            f"input {lengths.index(longest)} has {longest:,} tokens; the embedder reads at"
            f" most {embedder.max_tokens:,}. Split the text.",
            "too_long",
            "input",
        )
    for at in range(0, len(texts), BATCH_TEXTS):
        check(None)
        vectors += [*embedder.embed(texts[at : at + BATCH_TEXTS])]
    return vectors, sum(lengths)
