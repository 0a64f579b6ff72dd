"""The answers of one request, generated in the background and read by the HTTP response.

A slow client does not delay the queue: the request's turn ends when all answers are generated, even
if the client is still reading. If the client disconnects, generation ends at the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.ask import Ask, Question
from ragfuse.engine.engine import Engine
from ragfuse.engine.request import PreparedPrompt
from ragfuse.serve.refusals import APIError
from ragfuse.types.answer import Answer, Thought

MAX_TRACED_TOKENS = 16_384
"""Maximum prompt tokens in a token trace."""


def token_fates(prepared: PreparedPrompt) -> tuple[Sequence[int], str]:
    """Return the token ids of a prefilled prompt, and a text with one letter per token.

    The letter "f" means a fresh token. "p" means reused exactly, from a prefix, a module or earlier
    turns. "r" means reused from a stored chunk. "c" means a recomputed token of a stored chunk.
    """
    plan, prefill, fates = prepared.plan, prepared.prefill, list[str]()
    hits = {fetch.segment for fetch in plan.fetches} if not plan.fallback_reason else set()
    for at, segment in enumerate(plan.prompt.segments):
        lo, hi = plan.prompt.spans[at]
        reused = "r" if segment.kind == "chunk" else "p"
        fates += [reused if at in hits else "f"] * (hi - lo)
    for row in prefill.chosen.tolist():
        fates[row] = "c" if fates[row] == "r" else fates[row]
    fates[: prefill.n_before] = ["p"] * prefill.n_before
    return plan.prompt.token_ids, "".join(fates)


def token_trace(engine: Engine, ids: Sequence[int], fates: str) -> dict[str, Any]:
    """Return text and fate of the first `MAX_TRACED_TOKENS` prompt tokens, and the token count."""
    decode, shown = engine.model.tokenizer.decode, ids[:MAX_TRACED_TOKENS]
    texts = [decode([id], skip_special_tokens=False) for id in shown]
    return {"tokens": len(ids), "texts": texts, "fates": fates[: len(shown)]}


ZERO_LOGPROB = -9999.0
"""The log probability that OpenAI reports for probability zero."""

DecodeToken = Callable[[int], str]


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log probability before sampling options are applied.

    Args:
        id: The token id.
        logprob: The token's log probability.
        top: The most likely tokens at this position, as (id, log probability), best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecorder:
    """A logits processor that records the log probabilities of one sequence.

    `generate` calls the recorder before sampling a token, so the sampled token is recorded at the
    next call. `take` may be called from another thread.

    Args:
        n_top: Number of most likely tokens to record per position.
    """

    def __init__(self, n_top: int) -> None:
        self.n_top, self._n_taken = n_top, 0
        self._log_probabilities: Any = None
        self._recorded = list[TokenLogprob]()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Record the scores `[1, vocabulary]`; return them unchanged."""
        if self._log_probabilities is not None:
            self._record(int(input_ids[0, -1]))
        self._log_probabilities = scores[0].detach().float().log_softmax(-1)
        return scores

    def end(self, ids: Sequence[int]) -> None:
        """Record a finished answer's last token, `ids[-1]`. Drop recorded tokens beyond `ids`."""
        if self._log_probabilities is not None and len(self._recorded) < len(ids):
            self._record(ids[-1])
        self._log_probabilities = None
        del self._recorded[len(ids) :]

    def take(self) -> list[TokenLogprob]:
        """Return the tokens recorded since the previous call of `take`."""
        new = self._recorded[self._n_taken :]
        self._n_taken += len(new)
        return new

    def _record(self, token: int) -> None:
        row = self._log_probabilities
        top: tuple[tuple[int, float], ...] = ()
        if self.n_top:
            best = row.topk(self.n_top)
            top = tuple(zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True))
        self._recorded.append(TokenLogprob(token, _finite(float(row[token])), top))


def as_chat(token_logprobs: Sequence[TokenLogprob], decode: DecodeToken) -> dict[str, Any]:
    """Return the field `logprobs` of a chat completion."""
    content = [
        {
            **_token(each.id, each.logprob, decode),
            "top_logprobs": [_token(id, p, decode) for id, p in each.top],
        }
        for each in token_logprobs
    ]
    return {"content": content, "refusal": None}


def as_text(token_logprobs: Sequence[TokenLogprob], decode: DecodeToken) -> dict[str, Any]:
    """Return the field `logprobs` of a text completion, without `text_offset`."""
    tops = [{decode(id): p for id, p in reversed(each.top)} for each in token_logprobs]
    return {
        "tokens": [decode(each.id) for each in token_logprobs],
        "token_logprobs": [each.logprob for each in token_logprobs],
        "top_logprobs": tops,
    }


def _token(id: int, logprob: float, decode: DecodeToken) -> dict[str, Any]:
    text = decode(id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def _finite(value: float) -> float:
    return max(value, ZERO_LOGPROB)


@dataclass(frozen=True)
class AnswerRequest:
    """A request for one answer.

    Args:
        question: The prompt.
        ask: The options of the answer.
        recorder: Records log probabilities. None means that log probabilities are not requested.
        transfer: Hands the prefilled prompt to another engine and returns `kv_transfer_params`.
            None means that the KV is not handed over.
        traces_tokens: True to add the result of `token_trace` to the trace.
    """

    question: Question
    ask: Ask
    recorder: LogprobRecorder | None = None
    transfer: Callable[[PreparedPrompt], dict[str, Any]] | None = None
    traces_tokens: bool = False

    def take_logprobs(self, answer: Answer | None = None) -> list[TokenLogprob]:
        """Return the tokens recorded since the previous call. Pass `answer` in the last call."""
        if self.recorder is not None and answer is not None:
            self.recorder.end((*answer.token_ids, *answer.end_ids))
        return self.recorder.take() if self.recorder is not None else []


@dataclass(frozen=True)
class TextDelta:
    """A streamed piece of an answer: text or reasoning, and log probabilities of tokens."""

    index: int
    text: str
    token_logprobs: Sequence[TokenLogprob] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Completed:
    """The final item of an answer, with the whole answer.

    Args:
        index: The answer's index in the request.
        answer: The whole answer.
        is_late: True if the request's deadline passed before the answer ended.
        transfer_params: The parameters with which another engine finds the prompt's KV, or None.
        token_trace: The result of `token_trace`. None means that the trace was not requested.
    """

    index: int
    answer: Answer
    is_late: bool
    transfer_params: dict[str, Any] | None
    token_trace: dict[str, Any] | None

    @property
    def finish_reason(self) -> str:
        """Why the answer ended. "length" also means that the deadline cut the answer off."""
        reason = self.answer.finish_reason
        return "length" if self.is_late and reason == "stop" else reason

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The answer's tool calls in OpenAI's form. Every call has an id."""
        return [
            replace(call, id=call.id or f"call_{uuid4().hex[:24]}").as_openai()
            for call in self.answer.tool_calls
        ]

    @property
    def trace(self) -> dict[str, Any]:
        """The trace without `recomputed_rows`, which may be thousands of numbers."""
        trace = self.answer.trace.as_dict()
        del trace["recomputed_rows"]
        return trace if self.token_trace is None else {**trace, "token_trace": self.token_trace}


Item = TextDelta | Completed


class AnswerRun:
    """Generates the answers of one request in a background task, which starts at once.

    Args:
        requests: The answers to generate, one after another.
        engine: The tenant's engine.
        deadline_s: The deadline, in seconds on the event loop's clock. At the deadline, an answer
            that has begun ends with the text so far. Answers not begun fail with APIError (504).
        done: Called once, when the background task ends for any reason.
    """

    def __init__(
        self,
        requests: Sequence[AnswerRequest],
        engine: Engine,
        deadline_s: float,
        done: Callable[[], object],
    ) -> None:
        self.engine = engine
        self._requests, self._deadline_s, self._done = requests, deadline_s, done
        self._items: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
        self._is_late = self._is_over = self._has_begun = False
        self._stream: AnswerStream | None = None
        self._task = asyncio.create_task(self._write())

    async def read(self) -> AsyncIterator[Item]:
        """Yield pieces and completed answers as they are generated. Raise if generation fails."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def finish(self) -> None:
        """End the run at its deadline. A begun answer keeps its text; answers not begun fail."""
        self._is_late = True
        if self._has_begun and self._stream is not None:
            self._stream.finish()
        else:
            self.cancel(_late())

    def cancel(self, error: APIError | None = None) -> None:
        """Cancel all answers. The request's turn ends when the running computation is done."""
        if not self._is_over:
            self._items.put_nowait(error or _given_up())  # at once, not after a running prefill
        self._is_over = True
        if self._stream is not None:
            self._stream.cancel()

    async def _write(self) -> None:
        timer = asyncio.get_running_loop().call_at(self._deadline_s, self.finish)
        try:
            for index, request in enumerate(self._requests):
                if self._is_late:
                    raise _late()
                await self._answer(index, request)
            self._items.put_nowait(None)
        except BaseException as error:
            # a CancelledError means that the event loop is closing
            is_given_up = self._is_over or isinstance(error, asyncio.CancelledError)
            self._items.put_nowait(_given_up() if is_given_up else error)
        finally:
            timer.cancel()
            self._done()

    async def _answer(self, index: int, request: AnswerRequest) -> None:
        put, self._has_begun = self._items.put_nowait, False
        params: dict[str, Any] | None = None
        tokens: Sequence[Any] = ()

        def on_prepared(prepared: PreparedPrompt) -> None:
            nonlocal params, tokens
            if request.traces_tokens:
                tokens = token_fates(prepared)
            if request.transfer is not None:
                params = request.transfer(prepared)

        self._stream = stream = await asyncio.to_thread(
            self.engine.stream, request.question, request.ask, on_prepared=on_prepared
        )
        if self._is_over:
            stream.cancel()
        try:
            async for piece in stream.apieces():
                self._has_begun = True
                text, thought = ("", piece.text) if isinstance(piece, Thought) else (piece, "")
                put(TextDelta(index, text, request.take_logprobs(), thought))
            answer = stream.answer
            if token_logprobs := request.take_logprobs(answer):
                put(TextDelta(index, "", token_logprobs))
            trace = await asyncio.to_thread(token_trace, self.engine, *tokens) if tokens else None
            put(Completed(index, answer, self._is_late, params, trace))
        finally:
            stream.cancel()
            await asyncio.to_thread(stream.close)


def _late() -> APIError:
    return APIError(
        504, "The answer did not start in time. Send shorter prompts, or retry later.", "timeout"
    )


def _given_up() -> APIError:
    return APIError(
        503, "The answer was cancelled, because the server is stopping. Retry later.", "stopping"
    )
