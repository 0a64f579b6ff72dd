"""LangChain messages as the (role, content) messages of ragfuse. Nothing is tokenised or matched here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ragfuse import InputError, Piece

Part = str | Piece
Turn = tuple[str, list[Part]]

ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """(role, parts) per message, neighbours of one role as one: a chat template may want them to alternate.

    A str is text in which marked and known chunks are found; a Piece is a chunk with just these boundaries.
    """
    turns: list[Turn] = []
    for message in messages:
        role, parts = _role(message), _parts(message)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(["\n", *parts])
        else:
            turns.append((role, parts))
    return turns


def chunk_block(text: str, source: str = "") -> dict[str, Any]:
    """A content block whose text is one chunk with exact boundaries."""
    return {"type": "text", "text": text, "extras": {"ragfuse": {"chunk": True, "source": source}}}


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in ROLES:
        if isinstance(message, kind):
            return role
    raise InputError(f"A {type(message).__name__} cannot be answered; wanted system, human, AI or tool messages.")


def _parts(message: BaseMessage) -> list[Part]:
    if getattr(message, "tool_calls", None):
        raise InputError("A message holds tool calls, which this chat model cannot render; leave them out.")
    content = message.content
    blocks = [content] if isinstance(content, str) else content
    return [part for block in blocks for part in _part(block)]


def _part(block: Any) -> list[Part]:
    if isinstance(block, str):
        return [block]
    kind = block.get("type")
    if kind not in ("text", "text-plain") or not isinstance(block.get("text"), str):
        raise InputError(
            f"A content block of type '{kind}' cannot be read: this model takes text alone. Wanted strings and blocks "
            "of type 'text' or 'text-plain' that hold their text; leave other blocks out."
        )
    said = (block.get("extras") or {}).get("ragfuse") or {}
    source = str(said.get("source") or block.get("title") or "")
    is_chunk = bool(said.get("chunk", kind == "text-plain"))
    return [Piece(block["text"], "chunk", source or "message") if is_chunk else block["text"]]
