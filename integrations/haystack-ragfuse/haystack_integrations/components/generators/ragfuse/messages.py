"""Convert Haystack's chat messages and documents for ragfuse, and answers for Haystack."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

from haystack import Document
from haystack.dataclasses import (
    ChatMessage,
    TextContent,
    ToolCall,
    ToolCallResult,
)

import ragfuse
from ragfuse import Answer
from ragfuse.adapters import DocumentReader, source_of, text_only


def _document(found: Document) -> tuple[str, str, str]:
    text = (found.content or "").strip()
    return text, source_of(found.meta, text), ""


DOCUMENTS = DocumentReader(Document, _document)


def to_ragfuse_messages(messages: Sequence[ChatMessage] | str) -> list[ragfuse.ChatMessage]:
    """Convert Haystack's messages to ragfuse's messages.

    Adjacent messages of one role are merged (`ragfuse.ChatMessage.conversation`).

    Args:
        messages: Haystack's messages. A text counts as one user message.

    Raises:
        InputError: A message has unsupported content, or no message has text.
    """
    given = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
    return ragfuse.ChatMessage.conversation(
        each for message in given for each in _to_ragfuse_messages(message)
    )


def _to_ragfuse_messages(message: ChatMessage) -> list[ragfuse.ChatMessage]:
    if message.images or message.files:
        raise text_only("image" if message.images else "file")
    if message.tool_call_results:
        return [_result(each) for each in message.tool_call_results]
    calls = tuple(
        ragfuse.ToolCall(each.tool_name, each.arguments, each.id or "")
        for each in message.tool_calls
    )
    thought = "\n".join(each.reasoning_text for each in message.reasonings)
    return [
        ragfuse.ChatMessage(message.role.value, "\n".join(message.texts), calls, reasoning=thought)
    ]


def _result(result: ToolCallResult) -> ragfuse.ChatMessage:
    parts = [TextContent(result.result)] if isinstance(result.result, str) else result.result
    texts = [part.text for part in parts if isinstance(part, TextContent)]
    if len(texts) < len(parts):
        raise text_only("image")
    return ragfuse.ChatMessage(
        "tool", "\n".join(texts), (), result.origin.id or "", result.origin.tool_name
    )


def calls_of(answer: Answer) -> list[ToolCall]:
    """Return an answer's tool calls as Haystack's `ToolCall`s. A missing id is generated."""
    return [
        ToolCall(each.name, dict(each.arguments), each.id or f"call_{uuid4().hex}")
        for each in answer.tool_calls
    ]
