"""The body of `/v1/responses`, OpenAI's API for conversations that the server keeps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragfuse.serve.schema import AnswerOptions, Document, FailFast, RequestBody, StreamOptions
from ragfuse.types.request_limits import MAX_TITLE_CHARS

MAX_ITEMS = 4096
"""Most items of one input."""
MAX_METADATA = 16
"""Most pairs of `metadata`, as at OpenAI."""


class InputPart(BaseModel):
    """A part of an item's content: text, or a document where its type is text-plain."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "text", "text-plain", "refusal", "reasoning_text"]
    text: str = ""
    title: str | None = Field(default=None, max_length=MAX_TITLE_CHARS)


class InputItem(BaseModel):
    """One item of the input: a message, a tool call, a tool's result, or the model's reasoning.

    Unknown fields are ignored, as clients send back items of earlier responses whole.
    """

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[InputPart], FailFast] | None = None
    call_id: str | None = Field(default=None, max_length=256)
    name: str | None = Field(default=None, max_length=64)
    arguments: str | None = None
    output: str | Annotated[list[InputPart], FailFast] | None = None


class TextOptions(RequestBody):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "name": ..., "schema": {...}}."""
    verbosity: str | None = Field(default=None, max_length=64)


class ReasoningOptions(RequestBody):
    """How much the model reasons before its answer, for chat templates that read it."""

    effort: str | None = Field(default=None, max_length=64)


class ResponseRequest(RequestBody):
    """The body of `/v1/responses`."""

    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    """A system message before the input. Those of an earlier response are not carried over."""
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=128)
    """The stored response that this request continues."""
    store: bool | None = True
    """Whether the response can be continued and fetched later."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(default=None, ge=-1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    """Functions, in the flat form of this API: {"type": "function", "name": ..., "parameters": {...}}."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the last chunks of a prompt that is too long are left out; disabled: it is refused."""

    # ragfuse's own fields, as in `/v1/chat/completions`
    documents: Annotated[list[str | Document], FailFast] | None = Field(default=None, max_length=1000)
    """Retrieved documents, placed before the last user message."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    ragfuse: AnswerOptions = AnswerOptions()

    # labels, which never change an answer
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
