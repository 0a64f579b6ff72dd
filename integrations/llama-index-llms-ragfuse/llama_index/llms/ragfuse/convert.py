"""LlamaIndex messages and nodes as ragfuse takes them, and answers as LlamaIndex takes them."""

from __future__ import annotations

import json
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
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.llms.ragfuse.listening import note

import ragfuse
from ragfuse import Answer, Engine, InputError, ToolCall

ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.MODEL: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.FUNCTION: "tool",
}
SILENT = (CachePoint, ThinkingBlock, ToolCallBlock)
"""Blocks of a message that are no text of it."""


def turns_of(messages: Sequence[ChatMessage]) -> list[ragfuse.ChatMessage]:
    """A turn per message, plain neighbours of one role as one: a chat template may want them to alternate."""
    if not messages:
        raise InputError("There is nothing to answer: wanted at least one message, found none.")
    turns: list[ragfuse.ChatMessage] = []
    for message in messages:
        turn = _turn(message)
        if turns and _is_plain(turns[-1]) and _is_plain(turn) and turns[-1].role == turn.role:
            before = turns.pop()
            thoughts = "\n".join(filter(None, (before.reasoning, turn.reasoning)))
            turn = ragfuse.ChatMessage(turn.role, [*before.content, "\n", *turn.content], reasoning=thoughts)
        turns.append(turn)
    return turns


def _turn(message: ChatMessage) -> ragfuse.ChatMessage:
    role, said = ROLES.get(message.role, str(message.role.value)), message.additional_kwargs
    if role == "tool":
        call, name = said.get("tool_call_id"), said.get("name")
        return ragfuse.ChatMessage(role, _texts(message), tool_call_id=str(call or ""), name=str(name or ""))
    thoughts = [block.content for block in message.blocks if isinstance(block, ThinkingBlock) and block.content]
    thought = "\n".join(thoughts) if role == "assistant" else ""
    return ragfuse.ChatMessage(role, _texts(message), tool_calls=tuple(calls_of(message)), reasoning=thought)


def _is_plain(turn: ragfuse.ChatMessage) -> bool:
    return turn.role != "tool" and not turn.tool_calls


def _texts(message: ChatMessage) -> list[str]:
    for block in message.blocks:
        if not isinstance(block, (TextBlock, *SILENT)):
            raise InputError(
                f"A content block of type '{block.block_type}' cannot be read: this model takes text alone. "
                "Wanted TextBlock; leave other blocks out."
            )
    return [block.text for block in message.blocks if isinstance(block, TextBlock)]


def calls_of(message: ChatMessage) -> list[ToolCall]:
    """The tool calls of a message: its blocks, else OpenAI's form among its additional arguments."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if blocks:
        return [ToolCall(each.tool_name, _arguments(each.tool_kwargs), each.tool_call_id or "") for each in blocks]
    return [_call(each) for each in message.additional_kwargs.get("tool_calls") or ()]


def _call(given: Any) -> ToolCall:
    """A tool call in OpenAI's form, a mapping or an object of theirs."""
    call: Mapping[str, Any] = given if isinstance(given, Mapping) else given.model_dump()
    function = call.get("function") or {}
    return ToolCall(str(function.get("name", "")), _arguments(function.get("arguments")), str(call.get("id") or ""))


def _arguments(given: Any) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given or "{}")
        except ValueError as error:
            raise InputError(f"The arguments of a tool call are no JSON: wanted an object, found '{given}'.") from error
    return given if isinstance(given, Mapping) else {}


def text_of(node: BaseNode) -> str:
    """A node's text as synthesizers put it into a prompt."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def source_of(node: BaseNode) -> str:
    """Where a node came from, for people."""
    return str(node.metadata.get("file_name") or node.metadata.get("source") or node.ref_doc_id or node.node_id)


def completion(answer: Answer, engine: Engine, reuse: bool, delta: str | None = None) -> CompletionResponse:
    """The whole answer, `delta` being what of it was not said before."""
    raw = raw_of(answer, engine, reuse)
    return CompletionResponse(text=answer.text, delta=delta, raw=raw, additional_kwargs=_flat(raw))


def chat(answer: Answer, engine: Engine, reuse: bool, delta: str | None = None) -> ChatResponse:
    """The same as a message of the assistant, with its tool calls as blocks and in OpenAI's form."""
    raw, calls = raw_of(answer, engine, reuse), answer.tool_calls
    text = _said(answer.text, answer.reasoning, not calls)
    blocks = [
        ToolCallBlock(tool_call_id=each.id, tool_name=each.name, tool_kwargs={**each.arguments}) for each in calls
    ]
    said = {"tool_calls": [_openai(each) for each in calls]} if calls else {}
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*text, *blocks], additional_kwargs=said)
    return ChatResponse(message=message, delta=delta, raw=raw, additional_kwargs=_flat(raw))


def partly(said: str, thought: str, piece: Any) -> ChatResponse:
    """A message so far; piece: what was added to it. Of a thought it is put where LlamaIndex's agents look for it."""
    delta, more = (piece, {}) if isinstance(piece, str) else ("", {"thinking_delta": piece.text})
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=_said(said, thought))
    return ChatResponse(message=message, delta=delta, additional_kwargs=more)


def _said(text: str, thought: str, must: bool = True) -> list[ThinkingBlock | TextBlock]:
    """What was thought and said as blocks; must: also a text that is empty."""
    thoughts = [ThinkingBlock(content=thought)] if thought else []
    return [*thoughts, *([TextBlock(text=text)] if text or must else [])]


def _openai(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps({**call.arguments}, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def raw_of(answer: Answer, engine: Engine, reuse: bool) -> dict[str, Any]:
    """Usage and trace; cached_tokens were reused, cache_creation_tokens are encoded for next time."""
    trace, written = answer.trace, len(answer.token_ids)
    note(trace)
    saves = reuse and not engine.model.profile.refusal
    missed = sum(segment.n_tokens for segment in trace.segments if not segment.hit)
    details = {"cached_tokens": trace.tokens_reused, "cache_creation_tokens": missed if saves else 0}
    usage = {"prompt_tokens": trace.tokens, "completion_tokens": written, "total_tokens": trace.tokens + written}
    return {
        "model": engine.settings.model,
        "finish_reason": answer.finish_reason,
        **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
        "usage": {**usage, "prompt_tokens_details": details},
        "ragfuse": trace.as_dict(),
    }


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """What LlamaIndex's token counters read."""
    return {name: count for name, count in raw["usage"].items() if isinstance(count, int)}
