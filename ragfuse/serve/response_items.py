"""Convert the input of `/v1/responses` into a chat request: items into messages, flat tools into nested ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ragfuse.serve.refusals import unusable
from ragfuse.serve.requests import pieces_of
from ragfuse.serve.response_schema import InputItem, InputPart, ResponseRequest
from ragfuse.serve.schema import ChatRequest, ContentPart, RequestMessage, RequestToolCall


def items_of(body: ResponseRequest) -> list[InputItem]:
    """Return the input as items; the documents are parts of the last user message, so that later turns have them too.

    Raises:
        APIError: A document is empty, or there is no user message for them (400).
    """
    given = body.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else list(given)
    if not body.documents:
        return items
    last = max((at for at, item in enumerate(items) if item.role == "user"), default=None)
    if last is None:
        raise unusable("documents", "documents are placed before the last user message, found none. Add one.")
    parts = list[InputPart]()
    for piece in pieces_of(body.documents):
        parts.append(InputPart(type="text-plain", text=piece.text, title=piece.source))
        parts.append(InputPart(type="input_text", text="\n\n"))
    own = items[last].content or ""
    parts += [InputPart(type="input_text", text=own)] if isinstance(own, str) else own
    items[last] = items[last].model_copy(update={"content": parts})
    return items


def chat_request_of(body: ResponseRequest, items: Sequence[InputItem]) -> ChatRequest:
    """Return the chat request that a response answers.

    Args:
        body: The body of `/v1/responses`.
        items: All items of the conversation: those of the responses that it continues, then its own.

    Raises:
        APIError: An item, a tool or the form of the answer cannot be used (400).
    """
    messages = list(_messages(items))
    if body.instructions:
        messages.insert(0, RequestMessage(role="system", content=body.instructions))
    text = body.text
    options = body.ragfuse
    if body.truncation == "auto" and options.overflow is None:
        options = options.model_copy(update={"overflow": "drop"})
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        tools=[_nested(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_form(text.format) if text is not None else None,
        verbosity=text.verbosity if text is not None else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        ragfuse=options,
    )


def _messages(items: Sequence[InputItem]) -> Iterator[RequestMessage]:
    """Yield the messages; an assistant's text and its calls become one message, with the reasoning before them."""
    pending = list[InputItem]()
    for item in items:
        if item.type in ("function_call", "reasoning") or item.role == "assistant":
            pending.append(item)
            continue
        yield from _assistant(pending)
        pending = []
        if item.type == "function_call_output":
            if not item.call_id or item.output is None:
                raise unusable("input", "An item of type function_call_output needs call_id and output; give both.")
            yield RequestMessage(role="tool", content=_content(item.output), tool_call_id=item.call_id)
        elif item.role is None or item.content is None:
            raise unusable("input", "A message needs role and content; give both.")
        else:
            yield RequestMessage(role=item.role, content=_content(item.content))
    yield from _assistant(pending)


def _assistant(items: Sequence[InputItem]) -> Iterator[RequestMessage]:
    parts, calls, reasoning = list[ContentPart](), list[RequestToolCall](), ""
    for item in items:
        if item.type == "function_call":
            if not item.call_id or not item.name:
                raise unusable("input", "An item of type function_call needs call_id and name; give both.")
            function = RequestToolCall.Function(name=item.name, arguments=item.arguments or "{}")
            calls.append(RequestToolCall(id=item.call_id, function=function))
        elif item.type == "reasoning":
            texts = item.content if isinstance(item.content, list) else []
            reasoning += "".join(each.text for each in texts)
        elif item.content is None:
            raise unusable("input", "A message needs role and content; give both.")
        else:
            parts += _content(item.content)
    if parts or calls:
        yield RequestMessage(
            role="assistant", content=parts or None, tool_calls=calls or None, reasoning_content=reasoning or None
        )


def _content(given: str | Sequence[InputPart]) -> list[ContentPart]:
    parts = [InputPart(type="text", text=given)] if isinstance(given, str) else given
    return [
        ContentPart(type="text-plain" if part.type == "text-plain" else "text", text=part.text, title=part.title)
        for part in parts
        if part.type != "refusal"
    ]


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unusable(
            "tools",
            f"A tool of type {tool.get('type')!r:.40} cannot be used; wanted functions, which you call yourself.",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _form(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the form of the answer as `response_format` of chats has it."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
