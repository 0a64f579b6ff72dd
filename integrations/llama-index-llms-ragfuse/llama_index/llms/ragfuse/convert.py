"""LlamaIndex messages and nodes as ragfuse takes them, and answers as LlamaIndex takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole, TextBlock
from llama_index.core.schema import BaseNode, MetadataMode

from ragfuse import Answer, Engine, InputError

Turn = tuple[str, list[str]]

ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.MODEL: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.FUNCTION: "tool",
}


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """(role, texts) per message, neighbours of one role as one: a chat template may want them to alternate."""
    turns: list[Turn] = []
    for message in messages:
        role, texts = ROLES.get(message.role, str(message.role.value)), _texts(message)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(["\n", *texts])
        else:
            turns.append((role, texts))
    return turns


def _texts(message: ChatMessage) -> list[str]:
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise InputError(
                f"A content block of type '{block.block_type}' cannot be read: this model takes text alone. "
                "Wanted TextBlock; leave other blocks out."
            )
    return [block.text for block in message.blocks if isinstance(block, TextBlock)]


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
    """The same as a message of the assistant."""
    raw = raw_of(answer, engine, reuse)
    message = ChatMessage(role=MessageRole.ASSISTANT, content=answer.text)
    return ChatResponse(message=message, delta=delta, raw=raw, additional_kwargs=_flat(raw))


def raw_of(answer: Answer, engine: Engine, reuse: bool) -> dict[str, Any]:
    """Usage and trace; cached_tokens were reused, cache_creation_tokens are encoded for next time."""
    trace, written = answer.trace, len(answer.token_ids)
    saves = reuse and not engine.model.profile.refusal
    missed = sum(segment.n_tokens for segment in trace.segments if not segment.hit)
    details = {"cached_tokens": trace.tokens_reused, "cache_creation_tokens": missed if saves else 0}
    usage = {"prompt_tokens": trace.tokens, "completion_tokens": written, "total_tokens": trace.tokens + written}
    return {
        "model": engine.settings.model,
        "finish_reason": answer.finish_reason,
        "usage": {**usage, "prompt_tokens_details": details},
        "ragfuse": trace.as_dict(),
    }


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """What LlamaIndex's token counters read."""
    return {name: count for name, count in raw["usage"].items() if isinstance(count, int)}
