"""An answer as OpenAI's Responses API writes it: the events of its making, the last of which has
the response.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

from ragfuse.serve.refusals import APIError
from ragfuse.serve.response_schema import ResponseRequest
from ragfuse.serve.run import Completed, Item, TextDelta
from ragfuse.types.answer import Answer

Json = dict[str, Any]


class ResponseEvents:
    """The events of one response.

    Args:
        body: The request.
        model: Name of the model, as clients see it.
        id: Id of the response.
        keep: Called with the whole response before its last event.
    """

    last = b""

    def __init__(
        self, body: ResponseRequest, model: str, id: str, keep: Callable[[Json], Awaitable[None]]
    ) -> None:
        self._body, self._keep = body, keep
        self._number = 0
        self._items: list[Json] = []
        self._open = ""
        self._head: Json = {
            **body.model_dump(
                include={"instructions", "max_output_tokens", "previous_response_id", "user"}
            ),
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "error": None,
            "incomplete_details": None,
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": body.store is not False,
            "temperature": body.temperature or 0.0,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": True, "parameters": None, **tool} for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }

    async def events(self, items: AsyncIterator[Item]) -> AsyncIterator[Json]:
        """Yield the events of the items."""
        started = {**self._head, "status": "in_progress", "output": []}
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        async for item in items:
            if isinstance(item, TextDelta):
                kind, text = (
                    ("reasoning", item.reasoning) if item.reasoning else ("message", item.text)
                )
                for event in self._piece(kind, text) if text else ():
                    yield event
                continue
            for event in self._ending(item.answer):
                yield event
            response = self._response(item)
            await self._keep(response)
            yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: APIError) -> Json:
        """Return the event of an error that ends a stream."""
        told = {"code": "server_error", "message": error.message}
        response = {**self._head, "status": "failed", "output": self._items, "error": told}
        return self._event("response.failed", response=response)

    def whole(self, events: Sequence[Json]) -> Json:
        """Return the response that all events make."""
        response: Json = events[-1]["response"]
        return response

    def _response(self, completed: Completed) -> Json:
        is_cut = completed.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        for item in self._items:
            if item["type"] == "message":
                item["status"] = status
        trace, n_written = completed.answer.trace, len(completed.answer.token_ids)
        usage = {
            "input_tokens": trace.tokens,
            "input_tokens_details": {"cached_tokens": trace.tokens_found, "cache_write_tokens": 0},
            "output_tokens": n_written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": trace.tokens + n_written,
        }
        why = {"reason": "max_output_tokens"} if is_cut else None
        told = {"status": status, "output": self._items, "usage": usage, "ragfuse": completed.trace}
        return {**self._head, **told, "incomplete_details": why}

    def _piece(self, kind: str, text: str) -> Iterator[Json]:
        """Yield the events of a piece of the message, or of the reasoning before it."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._items.append(_item(kind))
            yield self._item_event("added", {**self._items[-1], "content": []})
            yield self._part_event(
                "response.content_part.added", part={**self._items[-1]["content"][0]}
            )
        self._items[-1]["content"][0]["text"] += text
        yield self._text_event("delta", delta=text)

    def _close(self) -> Iterator[Json]:
        """Yield the events that end the open item, if there is one."""
        if not self._open:
            return
        item = self._items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        yield self._text_event("done", text=part["text"])
        yield self._part_event("response.content_part.done", part=part)
        yield self._item_event("done", item)
        self._open = ""

    def _ending(self, answer: Answer) -> Iterator[Json]:
        """Yield the end of the open item, and the calls, which come whole."""
        if not self._items and not answer.tool_calls:  # an answer without any text
            yield from self._piece("message", "")
        yield from self._close()
        for call in answer.tool_calls:
            said = call.as_openai()["function"]
            named = {"call_id": call.id or f"call_{uuid4().hex[:24]}", "name": said["name"]}
            item = {
                "id": f"fc_{uuid4().hex}",
                "type": "function_call",
                "status": "completed",
                **named,
            }
            self._items.append({**item, "arguments": said["arguments"]})
            yield self._item_event("added", {**item, "arguments": ""})
            at = {"item_id": item["id"], "output_index": len(self._items) - 1}
            yield self._event(
                "response.function_call_arguments.delta", **at, delta=said["arguments"]
            )
            yield self._event("response.function_call_arguments.done", **at, **said)
            yield self._item_event("done", self._items[-1])

    def _item_event(self, what: str, item: Json) -> Json:
        return self._event(
            f"response.output_item.{what}", output_index=len(self._items) - 1, item=item
        )

    def _part_event(self, kind: str, **fields: Any) -> Json:
        place = {
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }
        return self._event(kind, **place, **fields)

    def _text_event(self, what: str, **fields: Any) -> Json:
        name = self._items[-1]["content"][0]["type"]
        return self._part_event(f"response.{name}.{what}", logprobs=[], **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _item(kind: str) -> Json:
    """Return an empty message, or the reasoning before it."""
    item: Json = {"id": f"{kind[:3]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {**item, "role": "assistant", "content": [part]}
