"""Convert LlamaIndex's messages and nodes for ragfuse, and answers for LlamaIndex."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

import ragfuse
from ragfuse import Answer, ToolCall
from ragfuse.adapters import DocumentReader, source_of, text_only

ASSISTANT_ROLES = (MessageRole.ASSISTANT, MessageRole.MODEL, MessageRole.CHATBOT)
NOT_TEXT = (CachePoint, ThinkingBlock, ToolCallBlock)
"""Types of content blocks that are not part of a message's text."""


def to_ragfuse_messages(messages: Sequence[ChatMessage]) -> list[ragfuse.ChatMessage]:
    """Convert messages for ragfuse, and merge adjacent messages of one role."""
    return ragfuse.ChatMessage.conversation(map(_to_ragfuse_message, messages))


def _to_ragfuse_message(message: ChatMessage) -> ragfuse.ChatMessage:
    role, texts = str(message.role.value), _texts(message)
    if message.role in (MessageRole.TOOL, MessageRole.FUNCTION):
        call, name = (
            str(message.additional_kwargs.get(each) or "") for each in ("tool_call_id", "name")
        )
        return ragfuse.ChatMessage(role, texts, tool_call_id=call, name=name)
    reasonings = [
        block.content
        for block in message.blocks
        if isinstance(block, ThinkingBlock) and block.content
    ]
    reasoning = "\n".join(reasonings) if message.role in ASSISTANT_ROLES else ""
    return ragfuse.ChatMessage(
        role, texts, tool_calls=tuple(calls_of(message)), reasoning=reasoning
    )


def _texts(message: ChatMessage) -> list[str]:
    for block in message.blocks:
        if not isinstance(block, (TextBlock, *NOT_TEXT)):
            raise text_only(block.block_type)
    return [block.text for block in message.blocks if isinstance(block, TextBlock)]


def calls_of(message: ChatMessage) -> list[ToolCall]:
    """Return the tool calls in a message's blocks, else in `additional_kwargs` (OpenAI's form)."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [
            ToolCall(
                each.tool_name, ToolCall.read_arguments(each.tool_kwargs), each.tool_call_id or ""
            )
            for each in blocks
        ]
    given = message.additional_kwargs.get("tool_calls") or ()
    return [
        ToolCall.from_openai(each if isinstance(each, Mapping) else each.model_dump())
        for each in given
    ]


def text_of(node: BaseNode) -> tuple[str, str]:
    """Return (text, source) of a node. The text has the node's metadata, as in synthesizers."""
    text = node.get_content(metadata_mode=MetadataMode.LLM).strip()
    return text, source_of(node.metadata, text, node.ref_doc_id, node.node_id)


NODES = DocumentReader(
    NodeWithScore, lambda found: (*text_of(found.node), found.node.get_content().strip())
)


def completion(answer: Answer, told: dict[str, Any]) -> CompletionResponse:
    """Return an answer as a completion. The metadata `told` becomes `raw`."""
    return CompletionResponse(text=answer.text, delta="", raw=told, additional_kwargs=_counts(told))


def chat(answer: Answer, told: dict[str, Any]) -> ChatResponse:
    """Return an answer as an assistant message, with tool calls as blocks and in OpenAI's form."""
    calls = answer.tool_calls
    text = _text_blocks(answer.text, answer.reasoning, not calls)
    blocks = [
        ToolCallBlock(tool_call_id=each.id, tool_name=each.name, tool_kwargs={**each.arguments})
        for each in calls
    ]
    kwargs = {"tool_calls": [each.as_openai() for each in calls]} if calls else {}
    message = ChatMessage(
        role=MessageRole.ASSISTANT, blocks=[*text, *blocks], additional_kwargs=kwargs
    )
    return ChatResponse(message=message, delta="", raw=told, additional_kwargs=_counts(told))


def partial_chat(text: str, reasoning: str, piece: Any) -> ChatResponse:
    """Return a streamed response with `piece` as `delta`, or as `thinking_delta` for reasoning."""
    delta, kwargs = (piece, {}) if isinstance(piece, str) else ("", {"thinking_delta": piece.text})
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=_text_blocks(text, reasoning))
    return ChatResponse(message=message, delta=delta, additional_kwargs=kwargs)


def _text_blocks(text: str, reasoning: str, always: bool = True) -> list[ThinkingBlock | TextBlock]:
    """Return reasoning and text as blocks. If `always`, an empty text gives a block, too."""
    reasonings = [ThinkingBlock(content=reasoning)] if reasoning else []
    return [*reasonings, *([TextBlock(text=text)] if text or always else [])]


def _counts(told: dict[str, Any]) -> dict[str, Any]:
    """Return the token numbers of an answer in the form that LlamaIndex's counters read."""
    return {name: count for name, count in told["usage"].items() if isinstance(count, int)}
