"""Converts LangChain messages to those of ragfuse. Nothing is tokenised or looked up in the store here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4
from zlib import crc32

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

Part = str | Piece

ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)
CALLS = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "input_json_delta"}
)
"""Types of content blocks of an AI message that only repeat its `tool_calls`."""
THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
MIN_CHARS = 24
"""The least characters of a document in a tool's artifact that is a chunk; a shorter one may match by chance."""

MAX_DEPTH = 4
"""Levels of nesting down to which documents are searched in an artifact, or in a step's input or output."""
HOLDERS = (Document, ToolMessage, Mapping, list, tuple)
"""Types that are documents or may contain some."""


def to_ragfuse_messages(messages: Sequence[BaseMessage]) -> list[ragfuse.ChatMessage]:
    """Return ragfuse's messages, neighbours of the same role joined (`ragfuse.ChatMessage.conversation`).

    In a content, a str is text in which marked and known chunks are found; a Piece is one chunk.
    """
    return ragfuse.ChatMessage.conversation(map(_to_ragfuse_message, messages))


def chunk_block(text: str, source: str = "") -> dict[str, Any]:
    """Return a content block whose text is exactly one chunk."""
    return {"type": "text", "text": text, "extras": {"ragfuse": {"chunk": True, "source": source}}}


def calls_of(answer: Answer) -> list[Call]:
    """Return an answer's tool calls in LangChain's form, each with an id."""
    return [
        Call(name=call.name, args=dict(call.arguments), id=call.id or f"call_{uuid4().hex}", type="tool_call")
        for call in answer.tool_calls
    ]


def source_of(document: Document, source_key: str = "source") -> str:
    """Return where a document comes from, for people: its source, else its id, else a checksum of its text."""
    unnamed = f"document {crc32(document.page_content.encode(errors='surrogatepass')):08x}"
    return str(document.metadata.get(source_key) or document.id or unnamed)


def _to_ragfuse_message(message: BaseMessage) -> ragfuse.ChatMessage:
    parts = _parts(message)
    if isinstance(message, AIMessage):
        calls = tuple(ToolCall(call["name"], call["args"], call["id"] or "") for call in message.tool_calls)
        return ragfuse.ChatMessage("assistant", parts, calls, reasoning=_reasoning(message))
    if isinstance(message, ToolMessage):
        split = _split_at_documents(parts, documents_in(message))
        return ragfuse.ChatMessage("tool", split, (), message.tool_call_id, message.name or "")
    return ragfuse.ChatMessage(
        _role(message), parts, name=message.name or "" if isinstance(message, FunctionMessage) else ""
    )


def _reasoning(message: AIMessage) -> str:
    """Return the reasoning before an answer: as `ChatRagFuse` returns it, or from content blocks."""
    reasoning = message.additional_kwargs.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        return reasoning
    blocks = [block for block in message.content if isinstance(block, dict)]
    texts = (block.get("reasoning") or block.get("thinking") for block in blocks if block.get("type") in THOUGHTS)
    return "\n".join(text for text in texts if isinstance(text, str))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in ROLES:
        if isinstance(message, kind):
            return role
    raise InputError(f"A {type(message).__name__} is not supported; use system, human, AI or tool messages.")


def _parts(message: BaseMessage) -> list[Part]:
    content = message.content
    blocks = [content] if isinstance(content, str) else content
    skipped = CALLS | THOUGHTS if isinstance(message, AIMessage) else frozenset()
    return [part for block in blocks for part in _part(block, skipped)]


def _part(block: Any, skipped: frozenset[str]) -> list[Part]:
    if isinstance(block, str):
        return [block] if block else []
    kind = block.get("type")
    if kind in skipped:
        return []
    if kind not in ("text", "text-plain") or not isinstance(block.get("text"), str):
        raise InputError(
            f"A content block of type '{kind}' cannot be read: this model takes text only. Wanted strings and blocks "
            "of type 'text' or 'text-plain' that hold their text; leave other blocks out."
        )
    options = (block.get("extras") or {}).get("ragfuse") or {}
    source = str(options.get("source") or block.get("title") or "")
    is_chunk = bool(options.get("chunk", kind == "text-plain"))
    return [Piece(block["text"], "chunk", source or "message") if is_chunk else block["text"]]


def documents_in(value: Any, depth: int = MAX_DEPTH) -> Iterator[Document]:
    """Yield the documents in a value, also those that a checkpointer or JSON brought back as mappings."""
    if isinstance(value, Document):
        yield value
    elif isinstance(value, ToolMessage):
        yield from documents_in(value.artifact, depth)
    elif isinstance(value, Mapping) and value.get("type") == "Document" and "page_content" in value:
        yield Document(value["page_content"], id=value.get("id"), metadata=value.get("metadata") or {})
    elif depth and isinstance(value, Mapping):
        for each in value.values():
            yield from documents_in(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        # Only a list's first item is inspected, as lists of other things, such as numbers, may be long.
        is_searched = isinstance(value, tuple) or isinstance(next(iter(value), None), HOLDERS)
        for each in value if is_searched else ():
            yield from documents_in(each, depth - 1)


def _split_at_documents(parts: Sequence[Part], documents: Iterator[Document]) -> list[Part]:
    """Return the content with each of the documents that it contains as a chunk; the longest are searched first."""
    split = list(parts)
    for document in sorted(documents, key=lambda each: -len(each.page_content)):
        text = document.page_content.strip()
        if len(text) >= MIN_CHARS:
            chunk = Piece(text, "chunk", source_of(document))
            split = [
                piece
                for part in split
                for piece in ([part] if isinstance(part, Piece) else _split_at_chunk(part, chunk))
            ]
    return split


def _split_at_chunk(text: str, chunk: Piece) -> list[Part]:
    first, *others = text.split(chunk.text)
    return [part for part in (first, *(each for other in others for each in (chunk, other))) if part != ""]
