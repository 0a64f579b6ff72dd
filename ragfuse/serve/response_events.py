"""An answer as OpenAI's Responses API writes it: the events of its making, the last of which has
the response.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

from ragfuse.serve.refusals import APIError
from ragfuse.serve.response_schema import ResponseRequest
from ragfuse.serve.run import Completed, Item

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
        self._keep, self._numbers = keep, count()
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
        yield self._event("created", response=started)
        yield self._event("in_progress", response=started)
        async for item in items:
            if isinstance(item, Completed):
                for event in self._ending(item):
                    yield event
                response = self._response(item)
                await self._keep(response)
                yield self._event(response["status"], response=response)
            elif text := item.reasoning or item.text:
                for event in self._piece("reasoning" if item.reasoning else "message", text):
                    yield event

    def failed(self, error: APIError) -> Json:
        """Return the event of an error that ends a stream."""
        told = {"code": "server_error", "message": error.message}
        response = {**self._head, "status": "failed", "output": self._items, "error": told}
        return self._event("failed", response=response)

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
        return {
            **self._head,
            "status": status,
            "output": self._items,
            "usage": {
                "input_tokens": trace.tokens,
                "input_tokens_details": {
                    "cached_tokens": trace.tokens_found,
                    "cache_write_tokens": 0,
                },
                "output_tokens": n_written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": trace.tokens + n_written,
            },
            "ragfuse": completed.trace,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }

    def _piece(self, kind: str, text: str) -> Iterator[Json]:
        """Yield the events of a piece of the message, or of the reasoning before it."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._items.append(item := _item(kind))
            yield self._item_event("output_item.added", item={**item, "content": []})
            yield self._item_event("content_part.added", part=item["content"][0])
        part = self._items[-1]["content"][0]
        part["text"] += text
        yield self._item_event(f"{part['type']}.delta", delta=text, logprobs=[])

    def _close(self) -> Iterator[Json]:
        """Yield the events that end the open item, if there is one."""
        if not self._open:
            return
        self._open, item = "", self._items[-1]
        part, item["status"] = item["content"][0], "completed"
        yield self._item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
        yield self._item_event("content_part.done", part=part)
        yield self._item_event("output_item.done", item=item)

    def _ending(self, completed: Completed) -> Iterator[Json]:
        """Yield the end of the open item, and the calls, which come whole."""
        calls = completed.calls
        if not self._items and not calls:  # an answer without any text
            yield from self._piece("message", "")
        yield from self._close()
        for call in calls:
            said, id = call["function"], f"fc_{uuid4().hex}"
            item = {"id": id, "type": "function_call", "status": "completed", **said}
            item["call_id"] = call["id"]
            self._items.append(item)
            yield self._item_event("output_item.added", item={**item, "arguments": ""})
            yield self._item_event("function_call_arguments.delta", delta=said["arguments"])
            yield self._item_event("function_call_arguments.done", **said)
            yield self._item_event("output_item.done", item=item)

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """Return an event of the last item, and of the one part of its content."""
        id, at = self._items[-1]["id"], len(self._items) - 1
        return self._event(kind, item_id=id, output_index=at, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}


def _item(kind: str) -> Json:
    """Return an empty message, or the reasoning before it."""
    item: Json = {"id": f"{kind[:3]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {**item, "role": "assistant", "content": [part]}
