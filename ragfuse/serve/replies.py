"""Format answers as OpenAI's API does: whole, or as server-sent events. The field `ragfuse` holds the trace."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from ragfuse.serve.logprobs import TokenLogprob, as_chat, as_text
from ragfuse.serve.refusals import api_error_of
from ragfuse.serve.run import Completed, TextDelta
from ragfuse.types.answer import Answer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ResponseWriter:
    """Formats the answers to one request.

    Args:
        model: Name of the model, as clients see it.
        is_chat: Whether it answers `/v1/chat/completions`; else `/v1/completions`.
        fingerprint: OpenAI's `system_fingerprint`.
        decode: Returns the text of one token id.
        wants_logprobs: Whether whole answers include log probabilities.
        with_usage: Whether a stream ends with an event that holds the usage.
        with_ids: Whether each answer comes with the ids of its tokens.
        n: Answers to each prompt.
        id: Id of the response.
        created: Unix time in seconds.
    """

    model: str
    is_chat: bool
    fingerprint: str
    decode: Callable[[int], str]
    wants_logprobs: bool = False
    with_usage: bool = False
    with_ids: bool = False
    n: int = 1
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, completed: Sequence[Completed], token_logprobs: dict[int, list[TokenLogprob]]) -> Json:
        """Return the response with all answers; `token_logprobs` is by index of the answer."""
        choices = [self._choice(each, token_logprobs.get(each.index, [])) for each in completed]
        traces = [self.trace(each) for each in completed]
        kind = "chat.completion" if self.is_chat else "text_completion"
        usage = usage_of(completed, self.n)
        trace = traces[0] if len(traces) == 1 else traces
        whole = {**self._head(kind), "choices": choices, "usage": usage, "ragfuse": trace}
        params = completed[0].transfer_params if completed else None
        return whole if params is None else {**whole, "kv_transfer_params": params}

    async def events(self, items: AsyncIterator[TextDelta | Completed]) -> AsyncIterator[bytes]:
        """Yield the answers as server-sent events; the last event is [DONE], or the error that ended the stream."""
        completed: list[Completed] = []
        begun: set[int] = set()
        offsets: dict[int, int] = {}
        try:
            async for item in items:
                if self.is_chat and item.index not in begun:
                    begun.add(item.index)
                    yield self._event(item.index, {"role": "assistant", "content": ""})
                for event in self._item_events(item, offsets):
                    yield event
                if isinstance(item, Completed):
                    completed.append(item)
        except Exception as error:
            yield _data(api_error_of(error).as_dict())
            return
        if self.with_usage:
            yield _data({**self._head(self._chunk_kind), "choices": [], "usage": usage_of(completed, self.n)})
        yield DONE

    def trace(self, completed: Completed) -> Json:
        """Return the trace without `recomputed_rows`, which may be thousands of numbers; with the tokens if wanted."""
        trace = completed.answer.trace.as_dict()
        del trace["recomputed_rows"]
        return trace if completed.token_trace is None else {**trace, "token_trace": completed.token_trace}

    # inside

    def _item_events(self, item: TextDelta | Completed, offsets: dict[int, int]) -> Iterator[bytes]:
        text = item.text if isinstance(item, TextDelta) else item.rest
        if self.is_chat and isinstance(item, TextDelta) and item.reasoning:
            yield self._event(item.index, {"reasoning_content": item.reasoning})
        offset = offsets.get(item.index, 0)
        logprobs = self._logprobs(item.token_logprobs, offset) if item.token_logprobs else None
        offsets[item.index] = offset + sum(len(self.decode(each.id)) for each in item.token_logprobs)
        if text or logprobs is not None:
            yield self._event(item.index, {"content": text} if self.is_chat else text, logprobs=logprobs)
        if isinstance(item, Completed):
            if calls := self._calls(item.answer):
                yield self._event(item.index, {"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
            delta: Json | str = {} if self.is_chat else ""
            yield self._event(item.index, delta, _reason(item), trace=self.trace(item), ids=self._ids(item))

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _event(
        self,
        index: int,
        delta: Json | str,
        reason: str | None = None,
        logprobs: Json | None = None,
        trace: Json | None = None,
        ids: Json | None = None,
    ) -> bytes:
        name = "delta" if self.is_chat else "text"
        choice = {"index": index, name: delta, "logprobs": logprobs, "finish_reason": reason, **(ids or {})}
        event = {**self._head(self._chunk_kind), "choices": [choice]}
        if self.with_usage:
            event["usage"] = None
        return _data(event if trace is None else {**event, "ragfuse": trace})

    def _choice(self, completed: Completed, token_logprobs: Sequence[TokenLogprob]) -> Json:
        answer = completed.answer
        logprobs = self._logprobs(token_logprobs) if self.wants_logprobs else None
        common = {"index": completed.index, "logprobs": logprobs, "finish_reason": _reason(completed)}
        common |= self._ids(completed)
        if not self.is_chat:
            return {**common, "text": completed.echo + answer.text}
        calls = self._calls(answer)
        message: Json = {"role": "assistant", "content": answer.text or (None if calls else ""), "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        return {**common, "message": {**message, "tool_calls": calls} if calls else message}

    def _ids(self, completed: Completed) -> Json:
        return {"token_ids": list(completed.answer.token_ids)} if self.with_ids else {}

    def _logprobs(self, token_logprobs: Sequence[TokenLogprob], offset: int = 0) -> Json:
        if self.is_chat:
            return {"content": as_chat(token_logprobs, self.decode), "refusal": None}
        return as_text(token_logprobs, self.decode, offset)

    def _calls(self, answer: Answer) -> list[Json]:
        named = (replace(call, id=call.id or f"call_{uuid4().hex[:24]}") for call in answer.tool_calls)
        return [call.as_openai() for call in named]


def usage_of(completed: Sequence[Completed], n: int = 1) -> Json:
    """Return OpenAI's usage; `cached_tokens` are those whose KV was found.

    A prompt counts once, however many answers it gets, with what its first answer reused.

    Args:
        completed: The answers of a request.
        n: Answers to each prompt.
    """
    prompts = [each.answer.trace for each in completed if each.index % n == 0]
    n_prompt, n_generated = sum(trace.tokens for trace in prompts), sum(len(e.answer.token_ids) for e in completed)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(trace.tokens_found for trace in prompts)},
    }


def _reason(completed: Completed) -> str:
    """Return the finish reason; "length" for an answer that its deadline cut off."""
    reason = completed.answer.finish_reason
    return "length" if completed.is_late and reason == "stop" else reason


def _data(payload: Json) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
