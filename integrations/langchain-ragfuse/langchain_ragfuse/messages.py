"""Convert LangChain's messages and documents for ragfuse, and tool calls for LangChain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import ToolCall as Call

import ragfuse
from ragfuse import Answer, InputError, Piece, ToolCall
from ragfuse.adapters import DocumentReader, source_of, text_only

ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)
CALLS = frozenset(
    {
        "tool_use",
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "function_call",
        "input_json_delta",
    }
)
"""Types of content blocks that only repeat the `tool_calls` of an AI message."""
THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
MIN_CHARS = 24
"""Minimum characters of a document in a tool's artifact. Shorter documents do not become chunks,
because they may occur in the message by chance.
"""


def source(document: Document) -> str:
    """Return a document's source, such as a file name, for traces and `ragfuse store`."""
    return source_of(document.metadata, document.page_content, document.id)


def _opened(value: Any) -> Any:
    """Return a tool message's artifact, the document in a JSON mapping, or the unchanged value."""
    if isinstance(value, ToolMessage):
        return value.artifact
    if isinstance(value, Mapping) and value.get("type") == "Document" and "page_content" in value:
        return Document(
            value["page_content"], id=value.get("id"), metadata=value.get("metadata") or {}
        )
    return value


DOCUMENTS = DocumentReader(
    Document, lambda found: (found.page_content.strip(), source(found), ""), _opened
)


def to_ragfuse_messages(messages: Sequence[BaseMessage]) -> list[ragfuse.ChatMessage]:
    """Convert LangChain's messages to ragfuse's messages.

    Adjacent messages of one role are merged (`ragfuse.ChatMessage.conversation`). In the result, a
    `Piece` is one chunk. The engine searches all other text for known chunks.
    """
    return ragfuse.ChatMessage.conversation(map(_to_ragfuse_message, messages))


def calls_of(answer: Answer) -> list[Call]:
    """Return an answer's tool calls in LangChain's form. A missing id is generated."""
    return [
        Call(
            name=call.name,
            args=dict(call.arguments),
            id=call.id or f"call_{uuid4().hex}",
            type="tool_call",
        )
        for call in answer.tool_calls
    ]


def _to_ragfuse_message(message: BaseMessage) -> ragfuse.ChatMessage:
    parts, name = _parts(message), message.name or ""
    if isinstance(message, AIMessage):
        calls = tuple(
            ToolCall(call["name"], call["args"], call["id"] or "") for call in message.tool_calls
        )
        return ragfuse.ChatMessage("assistant", parts, calls, reasoning=_reasoning(message))
    if isinstance(message, ToolMessage):
        return ragfuse.ChatMessage(
            "tool", _split(parts, DOCUMENTS(message)), (), message.tool_call_id, name
        )
    return ragfuse.ChatMessage(
        _role(message), parts, name=name if isinstance(message, FunctionMessage) else ""
    )


def _reasoning(message: AIMessage) -> str:
    """Return a message's reasoning, from `additional_kwargs` or else from content blocks."""
    blocks = [
        block
        for block in message.content
        if isinstance(block, dict) and block.get("type") in THOUGHTS
    ]
    texts = [message.additional_kwargs.get("reasoning_content")]
    texts = (
        texts if texts[0] else [block.get("reasoning") or block.get("thinking") for block in blocks]
    )
    return "\n".join(text for text in texts if isinstance(text, str))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in ROLES:
        if isinstance(message, kind):
            return role
    raise InputError(
        f"A {type(message).__name__} is not supported. Use system, human, AI or tool messages."
    )


def _parts(message: BaseMessage) -> list[str | Piece]:
    blocks = [message.content] if isinstance(message.content, str) else message.content
    skipped = CALLS | THOUGHTS if isinstance(message, AIMessage) else frozenset[str]()
    return [
        _part(block)
        for block in blocks
        if isinstance(block, str) or block.get("type") not in skipped
    ]


def _part(block: str | dict[str, Any]) -> str | Piece:
    if isinstance(block, str):
        return block
    kind, text = block.get("type"), block.get("text")
    if kind not in ("text", "text-plain") or not isinstance(text, str):
        raise text_only(str(kind))
    options = (block.get("extras") or {}).get("ragfuse") or {}
    if not options.get("chunk", kind == "text-plain"):
        return text
    return Piece(text, "chunk", str(options.get("source") or block.get("title") or "message"))


def _split(
    parts: Iterable[str | Piece], documents: Iterable[tuple[str, str, str]]
) -> list[str | Piece]:
    """Return the content as texts and chunks, with one chunk for each contained document."""
    split = list(parts)
    for text, name, _ in sorted(documents, key=lambda each: -len(each[0])):
        if len(text) >= MIN_CHARS:
            chunk = Piece(text, "chunk", name)
            split = [
                piece
                for part in split
                for piece in ([part] if isinstance(part, Piece) else _split_at_chunk(part, chunk))
            ]
    return split


def _split_at_chunk(text: str, chunk: Piece) -> list[str | Piece]:
    first, *others = text.split(chunk.text)
    return [
        part
        for part in (first, *(each for other in others for each in (chunk, other)))
        if part != ""
    ]
