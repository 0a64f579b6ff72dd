"""The body of `/v1/responses`, OpenAI's API for conversations that the server keeps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from ragfuse.serve.schema import AnswerBody, FailFast, LooseBody, RequestBody, parts_of
from ragfuse.types.request_limits import MAX_TITLE_CHARS

MAX_ITEMS = 4096
"""Most items of one input."""
CallId = Annotated[str, Field(min_length=1, max_length=256)]


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


class MessageItem(LooseBody):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputParts


class CallItem(LooseBody):
    """The model's call of a tool."""

    type: Literal["function_call"]
    call_id: CallId
    name: str = Field(min_length=1, max_length=64)
    arguments: str = "{}"


class ResultItem(LooseBody):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: InputParts


class ReasoningItem(LooseBody):
    """What the model thought."""

    type: Literal["reasoning"]
    content: InputParts = Field(default=[])


def _type_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]
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
