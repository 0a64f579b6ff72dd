"""Convert a question and an `Ask` to a request body; reject options that a server lacks."""

from __future__ import annotations

import json
from typing import Any

from ragfuse.engine.ask import SAMPLING, Ask, Question, is_ids, messages_of
from ragfuse.errors import InputError
from ragfuse.schemas.nodes import PMLPrompt
from ragfuse.schemas.pml import to_pml
from ragfuse.text.chat_messages import ChatMessage, Piece
from ragfuse.types.grammar import Grammar
from ragfuse.types.prompt import MAX_RETRIEVED, MAX_TITLE_CHARS
from ragfuse.types.texts import whole_text

Json = dict[str, Any]
CHAT, TEXT = "chat/completions", "completions"
FIELDS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids")
"""Options of transformers' `generate` whose names are the same in a request body."""
OWN_FIELDS = ("policy", "ratio", "deadline_s", "reuse", "blend")
"""Fields of an `Ask` that are sent inside the body's field `ragfuse`."""
LENGTHS = ("max_new_tokens", "min_new_tokens")
HANDLED = frozenset({"do_sample", "logit_bias", "max_time", *LENGTHS, *SAMPLING, *FIELDS})


def request_of(question: Question, ask: Ask) -> tuple[str, Json]:
    """Return the route and the body of a streaming request. The body lacks the field `model`.

    Args:
        question: A text, messages, token ids or a prompt in PML.
        ask: The options.

    Raises:
        InputError: A server does not support the question or an option.
    """
    path, body = _asked(question, ask)
    return path, {**body, **_shared(ask), "stream": True}


def prompt_for(question: Question) -> Json:
    """Return the request fields for counting a question's tokens."""
    if isinstance(question, PMLPrompt):
        return {"pml": to_pml(question), "messages": []}
    return {"messages": list(map(_message, messages_of(question)))}


def encoded(body: Json) -> bytes:
    """Return a body as UTF-8 JSON; InputError if a value cannot be written as JSON."""
    try:
        return whole_text(json.dumps(body, ensure_ascii=False, allow_nan=False)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"The request cannot be written as JSON ({error}). Use numbers, texts, lists and dicts."
        ) from error


def _asked(question: Question, ask: Ask) -> tuple[str, Json]:
    """Return the route and the fields that depend on the kind of question."""
    if is_ids(question) and not ask.tools:
        return TEXT, {"prompt": [int(id) for id in question]}
    if isinstance(question, str) and not ask.tools:
        return TEXT, {"prompt": question}
    body: Json = prompt_for(question)
    if ask.tools:
        choice = ask.tool_choice
        is_word = choice in ("auto", "none", "required")
        body["tools"] = [dict(tool) for tool in ask.tools]
        body["tool_choice"] = (
            choice if is_word else {"type": "function", "function": {"name": choice}}
        )
        body["parallel_tool_calls"] = ask.parallel_tool_calls
    if ask.chat_template_kwargs:
        body["chat_template_kwargs"] = dict(ask.chat_template_kwargs)
    return CHAT, body


def _shared(ask: Ask) -> Json:
    """Return the fields common to all requests; InputError for an unsupported option."""
    documents = [
        {"text": text, "title": _title(source)} for text, source in ask.documents if text.strip()
    ]
    options = ask.options
    unknown = next(
        (name for name, value in options.items() if name not in HANDLED and value is not None), None
    )
    if unknown is not None:
        raise InputError(
            f"A server does not accept the option '{unknown}' of transformers' `generate`, only"
            f" {', '.join(sorted(HANDLED))}. Remove '{unknown}', or use a local engine."
        )
    if options.get("do_sample") and not options.get("temperature"):
        raise InputError("Sampling on a server needs a temperature, such as 1.0. Set temperature=.")
    reuse = {
        **{name: getattr(ask, name) for name in OWN_FIELDS},
        "retrieved": documents[:MAX_RETRIEVED],
        "max_time_s": options.get("max_time"),
        "token_ids": True,
        "model_sampling": True,
    }
    biases = options.get("logit_bias") or {}
    return {
        **{name: options.get(name) for name in FIELDS},
        "min_tokens": options.get("min_new_tokens"),
        "max_tokens": options.get("max_new_tokens") if ask.max_tokens is None else ask.max_tokens,
        **{name: options.get(name) for name in SAMPLING if options.get("do_sample")},
        "logit_bias": {str(id): value for id, value in biases.items()},
        "stop": list(ask.stop),
        "seed": ask.seed,
        "session_id": ask.session,
        "structured_outputs": None if ask.grammar is None else _grammar(ask.grammar),
        "ragfuse": reuse,
    }


def _grammar(grammar: Grammar) -> Json:
    if grammar.kind == "json":
        return {"json": json.loads(grammar.source)}
    return {"regex" if grammar.kind == "regex" else "grammar": grammar.source}


def _message(message: ChatMessage) -> Json:
    found: Json = {
        "role": message.role,
        "content": [_part(piece) for piece in message.pieces],
        "tool_calls": [call.as_openai() for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }
    return {name: value for name, value in found.items() if value or name == "content"}


def _part(piece: Piece) -> Json:
    if piece.kind == "fresh":
        return {"type": "text", "text": piece.text}
    named = {"title": _title(piece.source)} if piece.source else {}
    return {"type": "text-plain", "text": piece.text, **named}


def _title(source: str) -> str:
    return whole_text(source)[:MAX_TITLE_CHARS]
