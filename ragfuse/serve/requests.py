"""Convert request bodies to `AnswerRequest`s, with documents as chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from ragfuse.engine.ask import SAMPLED, Ask
from ragfuse.errors import about
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.schemas.pml import parse_prompt
from ragfuse.serve.refusals import unusable
from ragfuse.serve.run import AnswerRequest, LogprobRecorder
from ragfuse.serve.schema import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Document,
    RequestMessage,
    SchemaFormat,
    TextRequest,
)
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.answer import ToolCall
from ragfuse.types.grammar import Grammar

MIN_TEMPERATURE = 1e-3
"""Lower temperatures mean greedy decoding, because the division of logits would overflow."""
GRAMMARS: Mapping[str, Callable[[Any], Grammar]] = MappingProxyType(
    {
        "json": Grammar.json,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }
)
"""Constructors of a `Grammar`, by field name in vLLM's `structured_outputs`."""


def chat_requests(body: ChatRequest) -> list[AnswerRequest]:
    """Convert a chat request to `n` `AnswerRequest`s; APIError (400) for contradictory fields."""
    if body.top_logprobs and not body.logprobs:
        raise unusable("top_logprobs", "top_logprobs needs logprobs: true. Send both or neither.")
    tools = body.tools or []
    named = body.model_dump(
        include={"enable_thinking", "reasoning_effort", "verbosity"}, exclude_none=True
    )
    ask = replace(
        _ask_of(body),
        max_tokens=(
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        ),
        tools=tools,
        tool_choice=Ask.tool_choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        chat_template_kwargs={**(body.chat_template_kwargs or {}), **named},
    )
    if body.pml and body.documents:
        raise unusable(
            "documents",
            "pml cannot be used with documents: a PML prompt has its own texts. Send only one.",
        )
    question = question_of(body.pml, with_documents(body.messages, body.documents))
    return _answers(question, ask, body.n or 1, body.top_logprobs or 0 if body.logprobs else None)


def text_requests(body: TextRequest) -> list[AnswerRequest]:
    """Convert a body to `n` `AnswerRequest`s per prompt. APIError (400) if fields conflict."""
    given, ask = body.prompt, replace(_ask_of(body), max_tokens=body.max_tokens)
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [
        request
        for prompt in ([given] if is_one else given)
        for request in _answers(prompt, ask, body.n or 1, body.logprobs)
    ]


def _answers(question: Any, ask: Ask, n: int, n_top: int | None) -> list[AnswerRequest]:
    """Return requests for `n` answers, with a seed and log probability recorder per answer."""
    found = list[AnswerRequest]()
    for number in range(n):
        own = replace(ask, seed=ask.seed + number if ask.seed is not None else None)
        recorder = LogprobRecorder(n_top) if n_top is not None else None
        if recorder is not None:
            own = replace(own, options={**own.options, "logits_processor": [recorder]})
        found.append(AnswerRequest(question, own, recorder))
    return found


def _ask_of(body: CompletionRequest) -> Ask:
    stop, options = body.stop, body.ragfuse
    if body.session_id is not None and (body.n or 1) > 1:
        raise unusable("n", "n must be 1 with session_id: a conversation has one answer per turn.")
    ask = Ask(
        **options.model_dump(include={"policy", "ratio", "reuse", "deadline_s", "blend"}),
        documents=tuple((each.text, each.title) for each in options.retrieved),
        stop=[stop] if isinstance(stop, str) else stop or (),
        seed=body.seed,
        options=_options(body),
        grammar=_grammar(body),
        session=body.session_id,
    )
    calls = getattr(body, "tools", None) and getattr(body, "tool_choice", None) != "none"
    if (body.min_tokens or body.stop_token_ids) and (
        calls or ask.grammar or (ask.stop and body.min_tokens)
    ):
        name = "min_tokens" if body.min_tokens else "stop_token_ids"
        raise unusable(
            name,
            f"{name} cannot be used with tools or an output format (min_tokens: nor with stop)."
            " Remove one of these fields.",
        )
    return ask


def _options(body: CompletionRequest) -> dict[str, Any]:
    """Return the options of transformers' `generate`. No temperature means greedy decoding."""
    values = {name: getattr(body, name) for name in SAMPLED}
    if (body.temperature or 0) < MIN_TEMPERATURE or body.top_p == 0:
        values["temperature"] = None
    if body.top_k is not None or not body.ragfuse.model_sampling:
        values["top_k"] = max(0, body.top_k or 0)
    more = {
        "stop_token_ids": body.stop_token_ids or None,
        "min_new_tokens": body.min_tokens or None,
        "max_time": body.ragfuse.max_time_s,
    }
    return {
        **Ask.generate_options(values),
        **{name: each for name, each in more.items() if each is not None},
    }


def question_of(
    pml: str | None, messages: Sequence[RequestMessage]
) -> list[ChatMessage] | PMLPrompt:
    """Return the PML prompt with the messages appended; without `pml`, only the conversation."""
    if pml is not None and not messages:
        return parse_prompt(pml)
    with about("messages"):
        conversation = ChatMessage.conversation(map(_chat_message, messages))
    if pml is None:
        return conversation
    prompt = parse_prompt(pml)
    for message in conversation:
        if message.role == "tool" or message.tool_calls:
            raise unusable(
                "messages",
                "pml cannot be used with tools. Remove messages of role 'tool' and tool_calls.",
            )
        prompt = prompt.asking(message.text, cast(Any, message.role))
    return prompt


def with_documents(
    messages: Sequence[RequestMessage], documents: Sequence[Document] | None
) -> list[RequestMessage]:
    """Insert documents into the last user message; APIError (400) without a user message."""
    found = list(messages)
    if not documents:
        return found
    at = max((at for at, each in enumerate(found) if each.role == "user"), default=None)
    if at is None:
        raise unusable(
            "documents",
            "documents go into the last user message, but there is none. Add a user message.",
        )
    parts = list[ContentPart]()
    for number, each in enumerate(documents, 1):
        title = each.title or f"document {number}"
        parts.append(ContentPart(type="text-plain", text=each.text, title=title))
        parts.append(ContentPart(type="text", text="\n\n"))
    found[at] = found[at].model_copy(update={"content": [*parts, *found[at].content]})
    return found


def _chat_message(message: RequestMessage) -> ChatMessage:
    is_assistant = message.role == "assistant"
    thoughts = "".join(part.text for part in message.content if part.type == "reasoning_text")
    if message.tool_calls and not is_assistant:
        raise unusable(
            "messages", f"Role '{message.role}' cannot have tool_calls. Use role 'assistant'."
        )
    return ChatMessage(
        message.role,
        [
            (
                Piece(part.text, "chunk", part.title or "message")
                if part.type == "text-plain" and part.text.strip()
                else part.text
            )
            for part in message.content
            if part.type not in ("refusal", "reasoning_text")
        ],
        tuple(
            ToolCall(call.function.name, ToolCall.read_arguments(call.function.arguments), call.id)
            for call in message.tool_calls or ()
        ),
        message.tool_call_id or "",
        message.name or "",
        (message.reasoning_content or message.reasoning or thoughts) if is_assistant else "",
    )


def _grammar(body: CompletionRequest) -> Grammar | None:
    """Return the answer's grammar, if any; APIError (400) if several fields set a format."""
    given = body.structured_outputs
    kinds = {} if given is None else given.model_dump(by_alias=True, exclude_none=True)
    found = [GRAMMARS[kind](value) for kind, value in kinds.items()]
    form = body.response_format if isinstance(body, ChatRequest) else None
    if isinstance(form, SchemaFormat):
        found.append(Grammar.json(form.json_schema.json_schema))
    elif form is not None and form.type == "json_object":
        found.append(Grammar.json(None))
    if len(found) > 1:
        raise unusable("structured_outputs", "Several fields set the output format. Set only one.")
    return found[0] if found else None
