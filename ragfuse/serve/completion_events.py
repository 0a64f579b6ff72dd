"""Chat and text completions as OpenAI's API writes them; the field `ragfuse` holds the trace."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from ragfuse.serve.logprobs import as_chat, as_text
from ragfuse.serve.refusals import APIError
from ragfuse.serve.run import Completed, Item, TextDelta
from ragfuse.serve.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]


class CompletionEvents:
    """The events of the answers to one request.

    Args:
        body: The request.
        model: Name of the model, as clients see it.
        fingerprint: OpenAI's `system_fingerprint`.
        decode: Returns the text of one token id.
    """

    last = b"data: [DONE]\n\n"

    def __init__(
        self, body: CompletionRequest, model: str, fingerprint: str, decode: Callable[[int], str]
    ) -> None:
        self._body, self._decode, self._is_chat = body, decode, isinstance(body, ChatRequest)
        self._completed: list[Completed] = []
        self._begun = set[int]()
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid4().hex}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    async def events(self, items: AsyncIterator[Item]) -> AsyncIterator[Json]:
        """Yield the events of the items."""
        options = self._body.stream_options
        shared = {"usage": None} if options is not None and options.include_usage else {}
        async for item in items:
            for choice in self._choices(item):
                trace = {"ragfuse": item.trace} if isinstance(item, Completed) else {}
                yield {**self._head, "choices": [choice], **shared, **trace}
        if shared:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def failed(self, error: APIError) -> Json:
        """Return the event of an error that ends a stream."""
        return error.as_dict()

    def whole(self, events: Sequence[Json]) -> Json:
        """Return the response that all events make."""
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
                as_told(found, self._decode) if found else None,
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
        """Return OpenAI's usage; a prompt counts once for its `n` answers, with what the first of
        these reused.
        """
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
    """Return what two events say of one thing: texts and lists one after the other, else what was
    told last.
    """
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{name: _joined(before.get(name), each) for name, each in value.items()}}
    if isinstance(before, str | list) and isinstance(value, str | list):
        return before + value  # type: ignore[operator]
    return before if value is None else value


def _whole_choice(choice: Json) -> Json:
    """Return a choice of a chat with its message in place of all deltas, of a text with the places
    of its tokens.
    """
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
