"""The body of `/v1/responses`, OpenAI's API for conversations that the server keeps, and the chat
request that it stands for: items become messages, flat tools nested ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from ragfuse.serve.refusals import unusable
from ragfuse.serve.schema import (
    AnswerBody,
    ChatRequest,
    Documents,
    FailFast,
    RequestBody,
    RequestMessage,
)


def _as_messages(given: Any) -> Any:
    """Return an input as chat messages; what cannot be one is left for pydantic to refuse."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_as_message(item) for item in given] if isinstance(given, list) else given


def _as_message(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": item}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output, id = item.get("output"), item.get("call_id")
        return {"role": "tool", "content": output, "tool_call_id": id}
    return {**item, "role": "assistant"} if kind == "reasoning" else item


Input = Annotated[
    list[RequestMessage],
    FailFast,
    BeforeValidator(_as_messages, json_schema_input_type=str | list[dict[str, Any]]),
]
"""A text, or items: messages, calls of tools with their outputs, and what the model thought.
Unknown fields are ignored, as clients send back earlier items whole.
"""
INPUT: TypeAdapter[list[RequestMessage]] = TypeAdapter(Input)
"""Reads items, and the messages that were made of them."""


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

    input: Annotated[Input, Field(min_length=1)]
    documents: Documents | None = None
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


def chat_request_of(
    body: ResponseRequest, messages: Sequence[RequestMessage], session: str | None
) -> ChatRequest:
    """Return the chat request that a response answers.

    Args:
        body: The body of `/v1/responses`.
        messages: The conversation: what the response continues, then its own input.
        session: The session of the conversation; None where nothing is stored.

    Raises:
        APIError: A tool cannot be used (400).
        ValidationError: The form of the answer cannot be used.
    """
    told = body.instructions
    system = [RequestMessage.model_validate({"role": "system", "content": told})] if told else []
    options = body.ragfuse
    choice: Any = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = body.text.format if body.text is not None else None
    return ChatRequest.model_validate(
        {
            **body.model_dump(
                include={"model", "temperature", "top_p", "seed", "parallel_tool_calls"}
            ),
            "messages": [*system, *_joined(messages)],
            "max_tokens": body.max_output_tokens,
            "tools": [_nested(tool) for tool in body.tools or ()] or None,
            "tool_choice": choice,
            "response_format": {"type": form.get("type"), "json_schema": form} if form else None,
            "verbosity": body.text.verbosity if body.text is not None else None,
            "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
            "session_id": session,
            "ragfuse": options,
        }
    )


def _joined(messages: Sequence[RequestMessage]) -> Iterator[RequestMessage]:
    """Yield the messages; an assistant's thoughts, text and calls, each an item, become one."""
    for is_assistants, group in groupby(messages, lambda message: message.role == "assistant"):
        first, *others = group
        if not is_assistants:
            yield from (first, *others)
            continue
        content, calls = [*first.content], [*(first.tool_calls or ())]
        for other in others:
            content += other.content
            calls += other.tool_calls or ()
        yield first.model_copy(update={"content": content, "tool_calls": calls})


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unusable(
            "tools",
            f"A tool of type {tool.get('type')!r:.40} cannot be used; wanted functions, which you"
            " call yourself.",
        )
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}
