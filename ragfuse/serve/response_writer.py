"""Format an answer as OpenAI's Responses API does: one response object, or the events of its making."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ragfuse.serve.refusals import api_error_of
from ragfuse.serve.response_schema import ResponseRequest
from ragfuse.serve.run import Completed, TextDelta
from ragfuse.types.answer import Answer

Json = dict[str, Any]


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
        cut_off = status == "incomplete"
        found: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": body.temperature or 0.0,
            "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": True, "parameters": None, **tool} for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage_of_response(answer) if answer is not None else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
        if answer is not None:
            trace = answer.trace.as_dict()
            del trace["recomputed_rows"]
            found["ragfuse"] = trace
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
                for event in self._item_events(item):
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

    def _item_events(self, item: TextDelta | Completed) -> Iterator[bytes]:
        thought = item.reasoning if isinstance(item, TextDelta) else ""
        text = item.text if isinstance(item, TextDelta) else item.rest
        if thought:
            yield from self._piece("reasoning", thought)
        if text:
            yield from self._piece("message", text)

    def _piece(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of the message or of the reasoning before it."""
        if self._kind != kind:
            yield from self._close()
            self._kind, self._text = kind, ""
            item = _message("", "in_progress") if kind == "message" else _reasoning("", "in_progress")
            self._items.append(item)
            yield self._output_event("response.output_item.added", item={**item, "content": []})
            yield self._part_event("response.content_part.added", part=item["content"][0])
        self._text += text
        if kind == "message":
            yield self._part_event("response.output_text.delta", delta=text, logprobs=[])
        else:
            yield self._part_event("response.reasoning_text.delta", delta=text)

    def _close(self) -> Iterator[bytes]:
        """Yield the events that end the open item, if there is one."""
        if not self._kind:
            return
        is_message = self._kind == "message"
        item = self._items[-1]
        item["content"][0]["text"], item["status"] = self._text, "completed"
        if is_message:
            yield self._part_event("response.output_text.done", text=self._text, logprobs=[])
        else:
            yield self._part_event("response.reasoning_text.done", text=self._text)
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
            item = _message("", "completed")
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


def usage_of_response(answer: Answer) -> Json:
    """Return the usage in this API's words; `cached_tokens` are those reused without recompute."""
    trace, n = answer.trace, len(answer.token_ids)
    return {
        "input_tokens": trace.tokens,
        "input_tokens_details": {"cached_tokens": trace.tokens_found, "cache_write_tokens": 0},
        "output_tokens": n,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": trace.tokens + n,
    }


def _output(answer: Answer) -> list[Json]:
    """Return the items of a whole answer: reasoning, message, calls."""
    calls = _calls(answer)
    found = [_reasoning(answer.reasoning, "completed")] if answer.reasoning else []
    found += [_message(answer.text, "completed")] if answer.text or not calls else []
    return [*found, *calls]


def _message(text: str, status: str) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "status": status, "content": content}


def _reasoning(text: str, status: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{uuid4().hex}", "type": "reasoning", "summary": [], "status": status, "content": content}


def _calls(answer: Answer) -> list[Json]:
    found = []
    for call in answer.tool_calls:
        function = call.as_openai()["function"]
        name = {"call_id": call.id or f"call_{uuid4().hex[:24]}", "name": function["name"]}
        fields = {"arguments": function["arguments"], "status": "completed"}
        found.append({"id": f"fc_{uuid4().hex}", "type": "function_call", **name, **fields})
    return found
