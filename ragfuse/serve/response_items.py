"""Convert the input of `/v1/responses` into a chat request: items into messages, flat tools into
nested ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ragfuse.serve.refusals import unusable
from ragfuse.serve.requests import last_user
from ragfuse.serve.response_schema import InputItem, InputPart, ResponseRequest
from ragfuse.serve.schema import ChatRequest

Json = dict[str, Any]


def items_of(body: ResponseRequest) -> list[InputItem]:
    """Return the input; the documents are parts of the last user message, so that later turns have
    them too.

    Raises:
        APIError: There is no user message for the documents (400).
    """
    items = list(body.input)
    if not body.documents:
        return items
    at = last_user([item.role for item in items])
    parts = list[InputPart]()
    for number, each in enumerate(body.documents, 1):
        title = each.title or f"document {number}"
        parts.append(InputPart(type="text-plain", text=each.text, title=title))
        parts.append(InputPart(type="input_text", text="\n\n"))
    items[at] = items[at].model_copy(update={"content": [*parts, *(items[at].content or ())]})
    return items


def chat_request_of(
    body: ResponseRequest, items: Sequence[InputItem], session: str | None
) -> ChatRequest:
    """Return the chat request that a response answers.

    Args:
        body: The body of `/v1/responses`.
        items: All items of the conversation: those of the responses that it continues, then its
            own.
        session: The session of the conversation; None where nothing is stored.

    Raises:
        APIError: A tool cannot be used (400).
        ValidationError: The form of the answer cannot be used.
    """
    messages = [
        message for group in groupby(items, key=_is_assistants) for message in _messages(*group)
    ]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    options = body.ragfuse
    if body.truncation == "auto" and options.overflow is None:
        options = options.model_copy(update={"overflow": "drop"})
    choice: Any = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = body.text.format if body.text is not None else None
    return ChatRequest.model_validate(
        {
            **body.model_dump(
                include={"model", "temperature", "top_p", "seed", "parallel_tool_calls"}
            ),
            "messages": messages,
            "max_tokens": body.max_output_tokens,
            "tools": [_nested(tool) for tool in body.tools or ()] or None,
            "tool_choice": choice,
            "response_format": {"type": form.get("type"), "json_schema": form} if form else None,
            "verbosity": body.text.verbosity if body.text is not None else None,
            "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
            "session_id": session,
            "ragfuse": options,
        }
    )


def _is_assistants(item: InputItem) -> bool:
    return item.type in ("function_call", "reasoning") or item.role == "assistant"


def _messages(is_assistants: bool, items: Iterator[InputItem]) -> Iterator[Json]:
    """Yield the messages; an assistant's text and its calls become one, with the reasoning before
    them.
    """
    if not is_assistants:
        for item in items:
            if item.type == "function_call_output":
                content, id = _content(item.output), item.call_id
                yield {"role": "tool", "content": content, "tool_call_id": id}
            else:
                yield {"role": item.role, "content": _content(item.content)}
        return
    parts, calls, reasoning = list[Json](), list[Json](), ""
    for item in items:
        if item.type == "function_call":
            said = {"name": item.name, "arguments": item.arguments or "{}"}
            calls.append({"id": item.call_id, "function": said})
        elif item.type == "reasoning":
            reasoning += "".join(part.text for part in item.content or ())
        else:
            parts += _content(item.content)
    if parts or calls:
        yield {
            "role": "assistant",
            "content": parts,
            "tool_calls": calls,
            "reasoning_content": reasoning,
        }


def _content(parts: Sequence[InputPart] | None) -> list[Json]:
    kept = ("text-plain", "refusal")
    return [
        {**part.model_dump(), "type": part.type if part.type in kept else "text"}
        for part in parts or ()
    ]


def _nested(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise unusable(
            "tools",
            f"A tool of type {tool.get('type')!r:.40} cannot be used; wanted functions, which you"
            " call yourself.",
        )
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}
