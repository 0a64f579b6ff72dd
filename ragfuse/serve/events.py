"""Convert answers to the events and responses of OpenAI's completions and Responses APIs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import accumulate, count
from typing import Any
from uuid import uuid4

from ragfuse.engine.engine import Engine
from ragfuse.serve.refusals import APIError
from ragfuse.serve.run import Completed, Item, TextDelta, as_chat, as_text
from ragfuse.serve.schema import ChatRequest, CompletionRequest, ResponseRequest

Json = dict[str, Any]


class CompletionEvents:
    """Converts generated answers to events of chat or text completions, in OpenAI's format.

    Args:
        body: The request's body.
        model: Name of the model in responses.
        engine: The engine that answers.
    """

    last = b"data: [DONE]\n\n"

    def __init__(self, body: CompletionRequest, model: str, engine: Engine) -> None:
        self._body, self._model, self._is_chat = body, engine.model, isinstance(body, ChatRequest)
        self._completed: list[Completed] = []
        self._begun = set[int]()
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{engine.digest[:10]}",
        }

    async def events(self, items: AsyncIterator[Item]) -> AsyncIterator[Json]:
        """Convert the items of an `AnswerRun` to events."""
        options = self._body.stream_options
        shared = {"usage": None} if options is not None and options.include_usage else {}
        async for item in items:
            for choice in self._choices(item):
                trace = {"ragfuse": item.trace} if isinstance(item, Completed) else {}
                yield {**self._head, "choices": [choice], **shared, **trace}
        if shared:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def failed(self, error: APIError) -> Json:
        """Return the error event that ends a stream."""
        return error.as_dict()

    def whole(self, events: Sequence[Json]) -> Json:
        """Return the response assembled from all events."""
        choices: dict[int, Json] = {}
        for choice in (each for event in events for each in event["choices"]):
            choices[choice["index"]] = _joined(choices.get(choice["index"]), choice)
        traces = [each.trace for each in self._completed]
        params = [
            each.transfer_params for each in self._completed if each.transfer_params is not None
        ]
        return {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": list(map(_whole_choice, choices.values())),
            "usage": self._usage(),
            "ragfuse": traces[0] if len(traces) == 1 else traces,
            **({"kv_transfer_params": params[0]} if params else {}),
        }

    def _choices(self, item: Item) -> Iterator[Json]:
        if self._is_chat and item.index not in self._begun:
            self._begun.add(item.index)
            yield self._choice(item.index, {"role": "assistant", "content": ""})
        if isinstance(item, TextDelta):
            as_told = as_chat if self._is_chat else as_text
            found = item.token_logprobs
            delta = (
                {"reasoning_content": item.reasoning} if item.reasoning else {"content": item.text}
            )
            yield self._choice(
                item.index,
                delta if self._is_chat else item.text,
                as_told(found, lambda id: self._model.text([id])) if found else None,
            )
            return
        self._completed.append(item)
        calls = [{"index": at, **call} for at, call in enumerate(item.calls)]
        if calls:
            yield self._choice(item.index, {"tool_calls": calls})
        ids = {"token_ids": list(item.answer.token_ids)} if self._body.ragfuse.token_ids else {}
        last = self._choice(item.index, {} if self._is_chat else "")
        yield {**last, "finish_reason": item.finish_reason, **ids}

    def _choice(self, index: int, delta: Json | str, logprobs: Json | None = None) -> Json:
        name = "delta" if self._is_chat else "text"
        return {"index": index, name: delta, "logprobs": logprobs, "finish_reason": None}

    def _usage(self) -> Json:
        """Return the field `usage`. A prompt's tokens are counted once for all `n` answers."""
        n = self._body.n or 1
        prompts = [each.answer.trace for each in self._completed if each.index % n == 0]
        n_prompt = sum(trace.tokens for trace in prompts)
        n_written = sum(len(each.answer.token_ids) for each in self._completed)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_written,
            "total_tokens": n_prompt + n_written,
            "prompt_tokens_details": {
                "cached_tokens": sum(trace.tokens_found for trace in prompts)
            },
        }


def _joined(before: Any, value: Any) -> Any:
    """Merge two events: concatenate texts and lists; replace other values, but never with None."""
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{name: _joined(before.get(name), each) for name, each in value.items()}}
    if isinstance(before, str | list) and isinstance(value, str | list):
        return before + value  # type: ignore[operator]
    return before if value is None else value


def _whole_choice(choice: Json) -> Json:
    """Convert a chat choice's deltas to a message; add text offsets to a text choice's tokens."""
    if "text" in choice:
        if logprobs := choice["logprobs"]:
            lengths = map(len, logprobs["tokens"][:-1])
            logprobs["text_offset"] = list(accumulate(lengths, initial=0))
        return choice
    delta = choice.pop("delta")
    calls = [
        {name: each for name, each in call.items() if name != "index"}
        for call in delta.pop("tool_calls", ())
    ]
    content = delta["content"] or (None if calls else "")
    message = {**delta, "content": content, "refusal": None}
    return {**choice, "message": {**message, "tool_calls": calls} if calls else message}


class ResponseEvents:
    """Converts a generated answer to events of the Responses API.

    The final event contains the whole response.

    Args:
        body: The request's body.
        model: Name of the model in responses.
        id: Id of the response.
        keep: Stores the whole response. Awaited before the final event is sent.
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
            "truncation": "disabled",
            "usage": None,
            "metadata": body.metadata or {},
        }

    async def events(self, items: AsyncIterator[Item]) -> AsyncIterator[Json]:
        """Convert the items of an `AnswerRun` to events."""
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
        """Return the error event that ends a stream."""
        told = {"code": "server_error", "message": error.message}
        response = {**self._head, "status": "failed", "output": self._items, "error": told}
        return self._event("failed", response=response)

    def whole(self, events: Sequence[Json]) -> Json:
        """Return the response assembled from all events."""
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
        """Yield the events that add text to an output item; `kind` is "message" or "reasoning"."""
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
        """Yield the events that close the open item."""
        if not self._open:
            return
        self._open, item = "", self._items[-1]
        part, item["status"] = item["content"][0], "completed"
        yield self._item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
        yield self._item_event("content_part.done", part=part)
        yield self._item_event("output_item.done", item=item)

    def _ending(self, completed: Completed) -> Iterator[Json]:
        """Close the open item, then yield the tool calls."""
        calls = completed.calls
        if not self._items and not calls:  # an answer without text
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
        id, at = self._items[-1]["id"], len(self._items) - 1
        return self._event(kind, item_id=id, output_index=at, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}


def _item(kind: str) -> Json:
    item: Json = {"id": f"{kind[:3]}_{uuid4().hex}", "type": kind, "status": "in_progress"}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {**item, "role": "assistant", "content": [part]}
