"""The answers of one request, generated one after the other in the background, and read by the HTTP
response.

A slow client does not delay the queue: the request's turn ends when its last answer is generated,
read or not. If the client disconnects, the generation ends at the next token.
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
from ragfuse.serve.logprobs import LogprobRecorder, TokenLogprob
from ragfuse.serve.refusals import APIError
from ragfuse.serve.token_trace import TokenRecorder
from ragfuse.serve.transfer import PromptTransfer
from ragfuse.types.answer import Answer, Thought


@dataclass(frozen=True)
class AnswerRequest:
    """A request for one answer.

    Args:
        question: The prompt.
        ask: How to answer it.
        recorder: Records the tokens' log probabilities; None: they are not wanted.
        transfer: Takes the prefilled prompt to another engine; None: the answer is generated here.
        tokens: Records what becomes of the prompt's tokens; None: that is not wanted.
    """

    question: Question
    ask: Ask
    recorder: LogprobRecorder | None = None
    transfer: PromptTransfer | None = None
    tokens: TokenRecorder | None = None

    def prefilled(self, prepared: PreparedPrompt) -> None:
        """Hand on the prefilled prompt to whoever wants it."""
        if self.tokens is not None:
            self.tokens.put(prepared)
        if self.transfer is not None:
            self.transfer.put(prepared)

    def take_logprobs(self, answer: Answer | None = None) -> list[TokenLogprob]:
        """Return the log probabilities recorded since the last call; with the finished answer, all
        remaining ones.
        """
        if self.recorder is not None and answer is not None:
            self.recorder.end((*answer.token_ids, *answer.end_ids))
        return self.recorder.take() if self.recorder is not None else []


@dataclass(frozen=True)
class TextDelta:
    """A piece of one answer.

    Args:
        index: The answer's index in the request.
        text: A piece of its text.
        token_logprobs: Log probabilities of the tokens since the last piece.
        reasoning: A piece of the model's reasoning.
    """

    index: int
    text: str
    token_logprobs: Sequence[TokenLogprob] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Completed:
    """The end of one answer, all of whose text came in pieces before.

    Args:
        index: The answer's index in the request.
        answer: The whole answer.
        is_late: Whether its deadline cut it off.
        transfer_params: How another engine finds the prompt's KV; None: it was not handed over.
        token_trace: What became of the prompt's tokens; None: that was not wanted.
    """

    index: int
    answer: Answer
    is_late: bool = False
    transfer_params: dict[str, Any] | None = None
    token_trace: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended; "length" where its deadline cut it off."""
        reason = self.answer.finish_reason
        return "length" if self.is_late and reason == "stop" else reason

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Its tool calls in OpenAI's form; those without an id get one."""
        return [
            replace(call, id=call.id or f"call_{uuid4().hex[:24]}").as_openai()
            for call in self.answer.tool_calls
        ]

    @property
    def trace(self) -> dict[str, Any]:
        """The trace without `recomputed_rows`, which may be thousands of numbers; with the tokens
        if wanted.
        """
        trace = self.answer.trace.as_dict()
        del trace["recomputed_rows"]
        return trace if self.token_trace is None else {**trace, "token_trace": self.token_trace}


Item = TextDelta | Completed


class AnswerRun:
    """Generates the answers of one request in a background task, started at once.

    Args:
        requests: The answers to generate, one after the other.
        engine: The tenant's engine.
        deadline_s: The deadline on the event loop's clock, in seconds. A running answer ends there
            with the text so far; an answer that has not begun fails with APIError (504).
        done: Called when the last answer has ended, was cancelled or failed.
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
        self._task = asyncio.get_running_loop().create_task(self._write())

    async def read(self) -> AsyncIterator[Item]:
        """Yield text pieces and completed answers as they come; raise the error that ended them, if
        any.
        """
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def finish(self) -> None:
        """Stop at the deadline. An answer that has started keeps its text so far; answers that have
        not started fail.
        """
        self._is_late = True
        if self._has_begun and self._stream is not None:
            self._stream.finish()
        else:
            self.cancel(_late())

    def cancel(self, error: APIError | None = None) -> None:
        """Cancel all answers. The turn ends once the running computation has; further calls do
        nothing.
        """
        if not self._is_over:
            self._items.put_nowait(error or _given_up())  # now: a running prefill may take a while
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
            # the event loop ends
            is_given_up = self._is_over or isinstance(error, asyncio.CancelledError)
            self._items.put_nowait(_given_up() if is_given_up else error)
        finally:
            timer.cancel()
            self._done()

    async def _answer(self, index: int, request: AnswerRequest) -> None:
        put = self._items.put_nowait
        self._has_begun = False
        self._stream = stream = await asyncio.to_thread(
            self.engine.stream, request.question, request.ask, prefilled=request.prefilled
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
            params = request.transfer.params if request.transfer is not None else None
            recorder = request.tokens
            tokens = (
                await asyncio.to_thread(recorder.as_dict, self.engine)
                if recorder is not None
                else None
            )
            put(Completed(index, answer, self._is_late, params, tokens))
        finally:
            stream.cancel()
            await asyncio.to_thread(stream.close)


def _late() -> APIError:
    return APIError(
        504, "The answer did not begin in time. Send less at once, or retry later.", "timeout"
    )


def _given_up() -> APIError:
    return APIError(
        503, "The answer was cancelled, because the server is stopping. Retry later.", "stopping"
    )
