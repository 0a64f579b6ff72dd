"""The answers of one request, generated one after the other in the background, and read by the HTTP response.

A slow client does not delay the queue: the request's turn ends when its last answer is generated, read or not. If the
client disconnects, the generation ends at the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.ask import Ask
from ragfuse.engine.engine import Engine
from ragfuse.engine.question import Question
from ragfuse.engine.request import PreparedPrompt
from ragfuse.serve.logprobs import LogprobRecorder, TokenLogprob, of_prompt
from ragfuse.serve.refusals import APIError
from ragfuse.serve.token_trace import TokenRecorder
from ragfuse.types.answer import Answer, Thought, Trace

HARD_S = 5.0
"""Seconds after its deadline at which an answer that has not ended fails."""


class Transfer(Protocol):
    """A receiver of a prefilled prompt, which another engine decodes."""

    def put(self, prepared: PreparedPrompt) -> None:
        """Take the prefilled prompt, before its answer is generated."""
        ...

    def params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the response."""
        ...


@dataclass(frozen=True)
class AnswerRequest:
    """A request for one answer.

    Args:
        question: The prompt.
        ask: How to answer it.
        recorder: Records the tokens' log probabilities; None: they are not wanted.
        echo: Text of the prompt to repeat before the answer; "": decode it from the token ids; None: no echo.
        n_top: Score the echoed prompt, with this many most likely tokens per position; None: do not score it.
        writes: Whether to generate an answer; False for scoring a prompt only.
        transfer: Takes the prefilled prompt to another engine; None: the answer is generated here.
        tokens: Records what becomes of the prompt's tokens; None: that is not wanted.
    """

    question: Question
    ask: Ask
    recorder: LogprobRecorder | None = None
    echo: str | None = None
    n_top: int | None = None
    writes: bool = True
    transfer: Transfer | None = None
    tokens: TokenRecorder | None = None

    def prefilled(self, prepared: PreparedPrompt) -> None:
        """Hand on the prefilled prompt to whoever wants it."""
        if self.tokens is not None:
            self.tokens.put(prepared)
        if self.transfer is not None:
            self.transfer.put(prepared)

    def take_logprobs(self, answer: Answer | None = None) -> list[TokenLogprob]:
        """Return the log probabilities recorded since the last call; with the finished answer, all remaining ones."""
        if self.recorder is not None and answer is not None:
            self.recorder.end((*answer.token_ids, *answer.end_ids))
        return self.recorder.take() if self.recorder is not None else []


@dataclass(frozen=True)
class TextDelta:
    """A streamed piece of one answer.

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
    """A finished answer.

    Args:
        index: The answer's index in the request.
        answer: The whole answer.
        rest: The part of its text that was not streamed yet.
        token_logprobs: Log probabilities that were not streamed yet.
        is_late: Whether its deadline cut it off.
        echo: The prompt, if it is repeated before the answer.
        transfer_params: How another engine finds the prompt's KV; None: it was not handed over.
        token_trace: What became of the prompt's tokens; None: that was not wanted.
    """

    index: int
    answer: Answer
    rest: str
    token_logprobs: Sequence[TokenLogprob] = ()
    is_late: bool = False
    echo: str = ""
    transfer_params: dict[str, Any] | None = None
    token_trace: dict[str, Any] | None = None


class AnswerRun:
    """Generates the answers of one request in a background task, started at once.

    Args:
        requests: The answers to generate, one after the other.
        engine: The tenant's engine.
        deadline_s: The deadline on the event loop's clock, in seconds. A running answer ends there with the text so
            far; an answer that has not begun fails with APIError (504).
        done: Called when the last answer has ended, was cancelled or failed.
    """

    def __init__(
        self, requests: Sequence[AnswerRequest], engine: Engine, deadline_s: float, done: Callable[[], object]
    ) -> None:
        self.engine = engine
        self._requests, self._deadline_s, self._done = requests, deadline_s, done
        self._items: asyncio.Queue[TextDelta | Completed | BaseException | None] = asyncio.Queue()
        self._is_late = self._is_over = self._has_begun = False
        self._stream: AnswerStream | None = None
        self._task = asyncio.get_running_loop().create_task(self._write())

    async def read(self) -> AsyncIterator[TextDelta | Completed]:
        """Yield text pieces and completed answers as they come; raise the error that ended them, if any."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def finish(self) -> None:
        """End the running answer now, at its deadline, and keep the text generated so far."""
        self._is_late = True
        if self._stream is not None:
            self._stream.finish()

    def cancel(self) -> None:
        """Cancel all answers. The turn ends once the running computation has; further calls do nothing."""
        if not self._is_over:
            self._items.put_nowait(_given_up())  # now: a running prefill may take a while
        self._is_over = True
        if self._stream is not None:
            self._stream.cancel()

    async def ended(self) -> None:
        """Wait until the generation has ended."""
        await asyncio.wait([self._task])

    async def _write(self) -> None:
        try:
            for index, request in enumerate(self._requests):
                await self._answer(index, request)
            self._items.put_nowait(None)
        except asyncio.CancelledError:  # the event loop ends
            self._items.put_nowait(_given_up())
        except Exception as error:
            self._items.put_nowait(_given_up() if self._is_over else _late() if self._is_late else error)
        finally:
            self._done()

    async def _answer(self, index: int, request: AnswerRequest) -> None:
        loop, n_sent = asyncio.get_running_loop(), 0
        echo = Echo("", ())
        if request.echo is not None or not request.writes:
            echo = await asyncio.to_thread(echo_of, self.engine, request, self._check)
            if request.echo is not None:
                self._items.put_nowait(TextDelta(index, echo.text, echo.token_logprobs))
        if not request.writes:
            self._items.put_nowait(Completed(index, echo.answer(self.engine), "", echo=echo.text))
            return
        transfer = request.transfer
        self._has_begun = False
        self._stream = stream = await asyncio.to_thread(
            self.engine.stream, request.question, request.ask, prefilled=request.prefilled
        )
        if self._is_over:
            stream.cancel()
        timers = loop.call_at(self._deadline_s, self.finish), loop.call_at(self._deadline_s + HARD_S, self._give_up)
        try:
            async for piece in stream.apieces():
                self._has_begun = True
                if isinstance(piece, Thought):
                    self._items.put_nowait(TextDelta(index, "", request.take_logprobs(), piece.text))
                else:
                    n_sent += len(piece)
                    self._items.put_nowait(TextDelta(index, piece, request.take_logprobs()))
            answer = stream.answer
            rest, token_logprobs = answer.text[n_sent:], request.take_logprobs(answer)
            params = transfer.params() if transfer is not None else None
            recorder = request.tokens
            tokens = await asyncio.to_thread(recorder.as_dict, self.engine, answer.trace) if recorder else None
            self._items.put_nowait(
                Completed(index, answer, rest, token_logprobs, self._is_late, echo.text, params, tokens)
            )
        finally:
            for timer in timers:
                timer.cancel()
            stream.cancel()
            await asyncio.to_thread(stream.close)

    def _check(self) -> None:
        """Raise APIError where the run was cancelled or is past its deadline."""
        if self._is_over or self._is_late:
            raise _given_up() if self._is_over else _late()

    def _give_up(self) -> None:
        """Report the missed deadline to the reader and cancel; the request's turn ends with the generation.

        An answer that has begun ends at its next token, and the reader gets what is written.
        """
        if self._has_begun:
            return
        self._items.put_nowait(_late())
        self.cancel()


@dataclass(frozen=True)
class Echo:
    """A prompt repeated before its answer, with its log probabilities."""

    text: str
    token_logprobs: Sequence[TokenLogprob]
    n_tokens: int = 0

    def answer(self, engine: Engine) -> Answer:
        """Return an answer of no tokens, for a request that only scores its prompt."""
        trace = Trace(engine.model.name, tokens=self.n_tokens, tokens_fresh=self.n_tokens)
        return Answer("", (), "length", trace)


def echo_of(engine: Engine, request: AnswerRequest, check: Callable[[], object]) -> Echo:
    """Return a prompt's text, with log probabilities from a separate forward pass if wanted.

    Args:
        engine: The tenant's engine.
        request: The answer request.
        check: Called now and then while scoring; raises to stop it.
    """
    question: Any = request.question
    ids = engine.prompt(question).token_ids
    if request.echo is None:
        return Echo("", (), len(ids))
    token_logprobs = of_prompt(engine.runtime.score(ids, request.n_top, check)) if request.n_top is not None else ()
    return Echo(request.echo or engine.model.text(ids), token_logprobs, len(ids))


def _late() -> APIError:
    return APIError(504, "The answer did not begin in time. Send less at once, or retry later.", "timeout")


def _given_up() -> APIError:
    return APIError(503, "The answer was cancelled, because the server is stopping. Retry later.", "stopping")
