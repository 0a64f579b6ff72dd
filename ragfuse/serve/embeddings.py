"""The route `/v1/embeddings`: vectors of texts by the embedder of the settings."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from ragfuse.models.embedder import Embedder
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.embedding_schema import EmbeddingRequest
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_state import token_counts_of
from ragfuse.serve.service import Service

BATCH_TEXTS = 32
"""Texts embedded in one step; between two steps the request may be ended."""


def embedding_routes(service: Service) -> APIRouter:
    """Return the route of embeddings."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the vectors of texts. Waits in the request queue."""
        embedder = service.embedder
        check_embedder(service, body.model)
        texts = _texts(body)
        counts = token_counts_of(request)

        def embed(_: object, check: Callable[[object], None]) -> dict[str, Any]:
            vectors, n_tokens = _embed(embedder, texts, body, check)
            counts.prompt = n_tokens
            data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)]
            usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
            return {"object": "list", "model": embedder.name, "data": data, "usage": usage}

        return await service.work_for(request, embed)

    return routes


def check_embedder(service: Service, name: str) -> None:
    """Raise APIError (404) for another model than the embedder."""
    if name not in (service.embedder.name, service.settings.embedder):
        raise APIError(
            404,
            f"This server embeds with '{service.embedder.name}', not '{name:.80}'. Ask for that one.",
            "model_not_found",
            "model",
        )


def _texts(body: EmbeddingRequest) -> list[str]:
    texts = [body.input] if isinstance(body.input, str) else body.input
    found = [each for each in texts if isinstance(each, str)]
    if len(found) < len(texts):
        raise APIError(
            400,
            "input has token ids; wanted texts, as the ids of another tokenizer mean nothing here. With LangChain's "
            "OpenAIEmbeddings: check_embedding_ctx_length=False.",
            "unusable",
            "input",
        )
    return found


def _embed(
    embedder: Embedder, texts: list[str], body: EmbeddingRequest, check: Callable[[object], None]
) -> tuple[list[Any], int]:
    """Return the vectors in the wanted form, and the number of tokens that were read."""
    if body.truncate_prompt_tokens not in (None, -1):
        raise APIError(
            400,
            f"truncate_prompt_tokens is {body.truncate_prompt_tokens}; wanted -1 (as many as the embedder reads) "
            "or null.",
            "unusable",
            "truncate_prompt_tokens",
        )
    limit, lengths = embedder.max_tokens, list[int]()
    for at in range(0, len(texts), BATCH_TEXTS):
        check(None)
        lengths += embedder.lengths(texts[at : at + BATCH_TEXTS])
    longest = max(range(len(texts)), key=lengths.__getitem__)
    if lengths[longest] > limit and body.truncate_prompt_tokens is None:
        raise APIError(
            400,
            f"input {longest} has {lengths[longest]:,} tokens; this embedder reads {limit:,}. Split the text, or give "
            "truncate_prompt_tokens: -1 to embed its beginning.",
            "too_long",
            "input",
        )
    vectors: list[Any] = []
    for at in range(0, len(texts), BATCH_TEXTS):
        check(None)
        found = embedder.embed(texts[at : at + BATCH_TEXTS])
        if body.encoding_format == "base64":
            vectors += [base64.b64encode(each.astype("<f4").tobytes()).decode() for each in found]
        else:
            vectors += found.tolist()
    return vectors, sum(min(each, limit) for each in lengths)
