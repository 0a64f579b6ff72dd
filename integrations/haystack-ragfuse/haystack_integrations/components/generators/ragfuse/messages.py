"""Converts Haystack's chat messages to those of ragfuse, and answers to replies. Nothing is looked up here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from haystack.dataclasses import ChatMessage, ReasoningContent, TextContent, ToolCall, ToolCallResult

import ragfuse
from ragfuse import Answer, InputError
from ragfuse.remote import Answerer


def to_ragfuse_messages(messages: Sequence[ChatMessage] | str) -> list[ragfuse.ChatMessage]:
    """Return ragfuse's messages, neighbours of the same role joined (`ragfuse.ChatMessage.conversation`).

    Args:
        messages: Haystack's messages; a text is a message of the user.

    Raises:
        InputError: A message holds what the model cannot read, or none holds text.
    """
    given = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
    return ragfuse.ChatMessage.conversation(each for message in given for each in _to_ragfuse_messages(message))


def _to_ragfuse_messages(message: ChatMessage) -> list[ragfuse.ChatMessage]:
    if not isinstance(message, ChatMessage):
        raise InputError(f"messages holds a {type(message).__name__}; wanted Haystack's ChatMessage, or one text.")
    if message.images or message.files:
        kind = "an image" if message.images else "a file"
        raise InputError(f"A message holds {kind}: this model reads text alone. Leave it out, or convert it to text.")
    if message.tool_call_results:
        return [_result(each) for each in message.tool_call_results]
    calls = tuple(ragfuse.ToolCall(each.tool_name, each.arguments, each.id or "") for each in message.tool_calls)
    thought = "\n".join(each.reasoning_text for each in message.reasonings)
    return [ragfuse.ChatMessage(message.role.value, "\n".join(message.texts), calls, reasoning=thought)]


def _result(result: ToolCallResult) -> ragfuse.ChatMessage:
    parts = [TextContent(result.result)] if isinstance(result.result, str) else result.result
    if not all(isinstance(part, TextContent) for part in parts):
        raise InputError(
            f"The result of the tool '{result.origin.tool_name}' holds more than text, and this model reads text "
            "alone. Let the tool return text."
        )
    text = "\n".join(part.text for part in parts if isinstance(part, TextContent))
    return ragfuse.ChatMessage("tool", text, (), result.origin.id or "", result.origin.tool_name)


def calls_of(answer: Answer) -> list[ToolCall]:
    """Return an answer's tool calls in Haystack's form, each with an id."""
    return [ToolCall(each.name, dict(each.arguments), each.id or f"call_{uuid4().hex}") for each in answer.tool_calls]


def reply(answer: Answer, calls: list[ToolCall], meta: dict[str, Any]) -> ChatMessage:
    """Return an answer as a message of the assistant."""
    return ChatMessage.from_assistant(
        text=answer.text or (None if calls else ""),
        tool_calls=calls,
        reasoning=ReasoningContent(answer.reasoning) if answer.reasoning else None,
        meta=meta,
    )


def meta_of(answer: Answer, engine: Answerer, reuse: bool, first_token: str | None = None) -> dict[str, Any]:
    """Return a reply's meta: model, finish reason, usage in OpenAI's form, and the trace under `ragfuse`.

    Args:
        answer: The answer.
        engine: What answered.
        reuse: Whether anything was to be reused; only then what was missed is encoded for later.
        first_token: When the first piece came, in ISO form, for a streamed answer.
    """
    trace, n_generated = answer.trace, len(answer.token_ids)
    saves = reuse and not engine.card.refusal
    usage = {
        "prompt_tokens": trace.tokens,
        "completion_tokens": n_generated,
        "total_tokens": trace.tokens + n_generated,
        "prompt_tokens_details": {
            "cached_tokens": trace.tokens_found,
            "cache_creation_tokens": trace.tokens_to_encode if saves else 0,
        },
    }
    return {
        "model": engine.card.name,
        "index": 0,
        "finish_reason": answer.finish_reason,
        **({"completion_start_time": first_token} if first_token else {}),
        "usage": usage,
        "ragfuse": trace.as_dict(),
    }


def now() -> str:
    """Return the time as Haystack's streams state it."""
    return datetime.now().isoformat()
