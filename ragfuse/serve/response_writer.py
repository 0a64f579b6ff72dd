"""Format an answer as OpenAI's Responses API does: one response object, or the events of its making."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from ragfuse.serve.refusals import api_error_of
from ragfuse.serve.response_schema import ResponseRequest
from ragfuse.serve.run import Completed, TextDelta
from ragfuse.types.answer import Answer

Json = dict[str, Any]
EVENT_NAMES = MappingProxyType({"message": "response.output_text", "reasoning": "response.reasoning_text"})
"""Where the names of events begin, by kind of item."""


@dataclass
class ResponseEvents:
    """Writes the response to one request.

    Args:
        body: The request.
        model: Name of the model, as clients see it.
        id: Id of the response.
        created: Unix time in seconds.
    """

    body: ResponseRequest
    model: str
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0
    _items: list[Json] = field(default_factory=list)
    _text: str = ""
    _kind: str = ""

    def response(self, status: str, output: list[Json], answer: Answer | None = None) -> Json:
        """Return the response object; `answer` once there is one."""
        body = self.body
        found: Json = {
            **body.model_dump(include={"instructions", "max_output_tokens", "previous_response_id", "user"}),
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
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
        if answer is not None:
            trace, n = answer.trace, len(answer.token_ids)
            found["ragfuse"] = {name: each for name, each in trace.as_dict().items() if name != "recomputed_rows"}
            found["usage"] = {
                "input_tokens": trace.tokens,
                "input_tokens_details": {"cached_tokens": trace.tokens_found, "cache_write_tokens": 0},
                "output_tokens": n,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": trace.tokens + n,
            }
        return found

    def whole(self, completed: Completed) -> Json:
        """Return the response with its answer."""
        answer = completed.answer
        output = self._items or _output(answer)
        status = "incomplete" if completed.is_late or answer.finish_reason == "length" else "completed"
        for item in output:
            if "status" in item:
                item["status"] = status if item["type"] == "message" else "completed"
        return self.response(status, output, answer)

    async def events(
        self, items: AsyncIterator[TextDelta | Completed], done: Callable[[Json], Awaitable[None]]
    ) -> AsyncIterator[bytes]:
        """Yield the events; `done` is called with the whole response before the last one."""
        started = self.response("in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        try:
            async for item in items:
                thought, text = ("", item.rest) if isinstance(item, Completed) else (item.reasoning, item.text)
                for kind, piece in (("reasoning", thought), ("message", text)):
                    for event in self._piece(kind, piece) if piece else ():
                        yield event
                if isinstance(item, Completed):
                    for event in self._ending(item.answer):
                        yield event
                    whole = self.whole(item)
                    await done(whole)
                    yield self._event(f"response.{whole['status']}", response=whole)
        except Exception as error:
            api_error = api_error_of(error)
            failed = self.response("failed", self._items)
            failed["error"] = {"code": "server_error", "message": api_error.message}
            yield self._event("response.failed", response=failed)

    # inside

    def _piece(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of the message or of the reasoning before it."""
        if self._kind != kind:
            yield from self._close()
            self._kind, self._text = kind, ""
            item = _item(kind, "", "in_progress")
            self._items.append(item)
            yield self._output_event("response.output_item.added", item={**item, "content": []})
            yield self._part_event("response.content_part.added", part=item["content"][0])
        self._text += text
        yield self._part_event(f"{EVENT_NAMES[kind]}.delta", delta=text, **_logprobs(kind))

    def _close(self) -> Iterator[bytes]:
        """Yield the events that end the open item, if there is one."""
        if not self._kind:
            return
        item = self._items[-1]
        item["content"][0]["text"], item["status"] = self._text, "completed"
        yield self._part_event(f"{EVENT_NAMES[self._kind]}.done", text=self._text, **_logprobs(self._kind))
        yield self._part_event("response.content_part.done", part=item["content"][0])
        yield self._output_event("response.output_item.done", item=item)
        self._kind = ""

    def _ending(self, answer: Answer) -> Iterator[bytes]:
        """Yield the end of the open item, and the calls, which come whole."""
        yield from self._close()
        for call in _calls(answer):
            self._items.append(call)
            yield self._output_event("response.output_item.added", item={**call, "arguments": ""})
            at = {"item_id": call["id"], "output_index": len(self._items) - 1}
            yield self._event("response.function_call_arguments.delta", **at, delta=call["arguments"])
            done = {"name": call["name"], "arguments": call["arguments"]}
            yield self._event("response.function_call_arguments.done", **at, **done)
            yield self._output_event("response.output_item.done", item=call)
        if not self._items:  # an answer without any text
            item = _item("message", "", "completed")
            self._items.append(item)
            yield self._output_event("response.output_item.added", item=item)
            yield self._output_event("response.output_item.done", item=item)

    def _output_event(self, kind: str, item: Json) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = json.dumps({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _output(answer: Answer) -> list[Json]:
    """Return the items of a whole answer: reasoning, message, calls."""
    calls = _calls(answer)
    found = [_item("reasoning", answer.reasoning, "completed")] if answer.reasoning else []
    found += [_item("message", answer.text, "completed")] if answer.text or not calls else []
    return [*found, *calls]


def _item(kind: str, text: str, status: str) -> Json:
    """Return a message, or the reasoning before it."""
    item: Json = {"id": f"{kind[:3]}_{uuid4().hex}", "type": kind, "status": status}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {**item, "role": "assistant", "content": [part]}


def _logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}


def _calls(answer: Answer) -> list[Json]:
    found = []
    for call in answer.tool_calls:
        function = call.as_openai()["function"]
        name = {"call_id": call.id or f"call_{uuid4().hex[:24]}", "name": function["name"]}
        fields = {"arguments": function["arguments"], "status": "completed"}
        found.append({"id": f"fc_{uuid4().hex}", "type": "function_call", **name, **fields})
    return found
