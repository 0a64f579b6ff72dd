"""The body of `/v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ragfuse.serve.schema import Ids, RequestBody

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
        | Annotated[list[EmbeddedText], Field(min_length=1, max_length=MAX_EMBEDDED, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_EMBEDDED, fail_fast=True)]
    )
    """The texts. Token ids are refused: they would be those of another model's tokenizer."""
    encoding_format: Literal["float", "base64"] | None = "float"
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    """-1: of a text that is longer than the embedder reads, only its beginning is embedded. Otherwise it is refused."""
    user: str | None = None
