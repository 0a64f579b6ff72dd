"""The route `/v1/embeddings`: vectors of texts by the embedder of the settings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ragfuse.models.embedder import Embedder
from ragfuse.serve.body import BodyRoute
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.schema import RequestBody
from ragfuse.serve.service import Service

BATCH_TEXTS = 32
"""Texts embedded in one step; between two steps the request may be ended."""
MAX_EMBEDDED = 2048
"""Most texts of one request, as at OpenAI."""
MAX_TEXT_CHARS = 65_536
"""Most characters of one of them."""
EmbeddedText = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]


class EmbeddingRequest(RequestBody):
    """The body of `/v1/embeddings`: one text or several."""

    model: str
    input: (
        EmbeddedText
        | Annotated[
            list[EmbeddedText], Field(min_length=1, max_length=MAX_EMBEDDED, fail_fast=True)
        ]
    )
    """The texts. Token ids are refused: they would be those of another model's tokenizer."""
    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = None


def embedding_routes(service: Service) -> APIRouter:
    """Return the route of embeddings."""
    routes, embedder = APIRouter(route_class=BodyRoute), service.embedder

    @routes.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the vectors of texts. Waits in the request queue."""
        if body.model not in (embedder.name, service.settings.embedder):
            text = (
                f"This server embeds with '{embedder.name}', not '{body.model:.80}'. Ask for that"
                " one."
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


def _embed(
    embedder: Embedder, texts: Sequence[str], check: Callable[[object], None]
) -> tuple[list[Any], int]:
    """Return the vectors, and the number of tokens that were read."""
    lengths, vectors = embedder.lengths(texts), list[Any]()
    if (longest := max(lengths)) > embedder.max_tokens:
        raise APIError(
            400,
            f"input {lengths.index(longest)} has {longest:,} tokens; this embedder reads"
            f" {embedder.max_tokens:,}. Split the text.",
            "too_long",
            "input",
        )
    for at in range(0, len(texts), BATCH_TEXTS):
        check(None)
        vectors += [*embedder.embed(texts[at : at + BATCH_TEXTS])]
    return vectors, sum(lengths)
