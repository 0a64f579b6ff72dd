"""The body of `/v1/responses`, OpenAI's API for conversations that the server keeps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from ragfuse.serve.schema import AnswerBody, FailFast, LooseBody, RequestBody, parts_of
from ragfuse.types.request_limits import MAX_TITLE_CHARS

MAX_ITEMS = 4096
"""Most items of one input."""


class InputPart(LooseBody):
    """A part of an item's content: text, or a document where its type is text-plain."""

    type: Literal["input_text", "output_text", "text", "text-plain", "refusal", "reasoning_text"]
    text: str = ""
    title: str | None = Field(default=None, max_length=MAX_TITLE_CHARS)


InputParts = Annotated[
    list[InputPart],
    FailFast,
    BeforeValidator(parts_of, json_schema_input_type=str | list[InputPart] | None),
]


class InputItem(LooseBody):
    """What somebody said, the model's call of a tool, what the tool answered, or what the model
    thought.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Who said a message."""
    content: InputParts | None = None
    """Of a message or a thought."""
    call_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Of a call and its output."""
    name: str | None = Field(default=None, min_length=1, max_length=64)
    """Of the tool that is called."""
    arguments: str | None = None
    """Of a call: a JSON object."""
    output: InputParts | None = None
    """What the tool answered."""


ITEMS: TypeAdapter[tuple[InputItem, ...]] = TypeAdapter(tuple[InputItem, ...])
"""Reads and writes items as they are stored. Unknown fields are ignored, as clients send back
earlier items whole.
"""


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class TextOptions(RequestBody):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "name": ..., "schema":
    {...}}.
    """
    verbosity: str | None = Field(default=None, max_length=64)


class ReasoningOptions(RequestBody):
    """How much the model reasons before its answer, for chat templates that read it."""

    effort: str | None = Field(default=None, max_length=64)


class ResponseRequest(AnswerBody):
    """The body of `/v1/responses`."""

    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: str | None = None
    """A system message before the input. Those of an earlier response are not carried over."""
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=128)
    """The stored response that this request continues."""
    store: bool | None = True
    """Whether the response can be continued and fetched later."""
    max_output_tokens: int | None = Field(default=None, ge=-1)
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    """Functions, in the flat form of this API: {"type": "function", "name": ..., "parameters":
    {...}}.
    """
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the last chunks of a prompt that is too long are left out; disabled: it is refused."""
