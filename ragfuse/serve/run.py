"""The answers of one request, generated one after the other in the background, and read by the HTTP response.

A slow reader does not hold up the queue: the request's turn ends when its last answer is generated, read or not. A
reader that is gone ends the generation at the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ragfuse.engine.answer_stream import AnswerStream
from ragfuse.engine.engine import Engine
from ragfuse.engine.options import Ask
from ragfuse.engine.question import Question
from ragfuse.serve.logprobs import Likely, Noted, of_prompt
from ragfuse.serve.refusals import APIError
from ragfuse.types.answer import Answer, Thought, Trace

HARD_S = 5.0
"""Seconds after its deadline at which an answer that has not ended fails."""


@dataclass(frozen=True)
class AnswerRequest:
    """A request for one answer.

    Args:
        question: The prompt.
        ask: How to answer it.
        noted: Records the tokens' log probabilities; None: not wanted.
        echo: Text of the prompt to repeat before the answer; "": decode it from the token ids; None: no echo.
        n_top: Score the echoed prompt, with this many most likely tokens per position; None: do not score it.
        writes: Whether to generate an answer; False for scoring a prompt only.
    """

    question: Question
    ask: Ask
    noted: Noted | None = None
    echo: str | None = None
    n_top: int | None = None
    writes: bool = True

    def likely(self, answer: Answer | None = None) -> list[Likely]:
        """Return the log probabilities since the last call; given the finished answer, all that are left."""
        if self.noted is not None and answer is not None:
            self.noted.end(answer.token_ids)
        return self.noted.take() if self.noted is not None else []


@dataclass(frozen=True)
class TextDelta:
    """A streamed piece of one answer.

    Args:
        index: The answer's index in the request.
        text: A piece of its text.
        likely: Log probabilities of tokens recorded since the last piece.
        reasoning: A piece of the model's reasoning.
    """

    index: int
    text: str
    likely: Sequence[Likely] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Completed:
    """A finished answer.

    Args:
        index: The answer's index in the request.
        answer: The whole answer.
        rest: The part of its text that was not streamed yet.
        likely: Log probabilities not streamed yet.
        is_late: Whether its deadline cut it off.
        echo: The prompt, if it is repeated before the answer.
    """

    index: int
    answer: Answer
    rest: str
    likely: Sequence[Likely] = ()
    is_late: bool = False
    echo: str = ""


class AnswerRun:
    """Generates the answers of one request in a background task, started at once.

    Args:
        wishes: The answers to generate, one after the other.
        engine: The tenant's engine.
        due_s: The deadline on the event loop's clock, in seconds. A running answer ends there with the text so far; an
            answer that has not begun fails with APIError (504).
        done: Called when the last answer has ended or was given up.
    """

    def __init__(
        self, wishes: Sequence[AnswerRequest], engine: Engine, due_s: float, done: Callable[[], object]
    ) -> None:
        self.engine = engine
        self._wishes, self._due_s, self._done = wishes, due_s, done
        self._items: asyncio.Queue[TextDelta | Completed | BaseException | None] = asyncio.Queue()
        self._is_late = self._is_over = False
        self._stream: AnswerStream | None = None
        self._task = asyncio.get_running_loop().create_task(self._write())

    async def read(self) -> AsyncIterator[TextDelta | Completed]:
        """Yield text pieces and completed answers as they come; raise the error that ended them, if any."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def finish(self) -> None:
        """End the answer at its deadline, and keep what was generated."""
        self._is_late = True
        if self._stream is not None:
            self._stream.finish()

    def cancel(self) -> None:
        """Cancel all answers. The turn ends once the running computation has; further calls do nothing."""
        self._is_over = True
        if self._stream is not None:
            self._stream.cancel()

    async def ended(self) -> None:
        """Wait until the generation has ended."""
        await asyncio.wait([self._task])

    async def _write(self) -> None:
        try:
            for index, wish in enumerate(self._wishes):
                await self._one(index, wish)
            self._items.put_nowait(None)
        except asyncio.CancelledError:  # the event loop ends
            self._items.put_nowait(_given_up())
        except Exception as error:
            self._items.put_nowait(_given_up() if self._is_over else _late() if self._is_late else error)
        finally:
            self._done()

    async def _one(self, index: int, wish: AnswerRequest) -> None:
        loop, said = asyncio.get_running_loop(), 0
        before = Echo("", ())
        if wish.echo is not None or not wish.writes:
            before = await asyncio.to_thread(echoed, self.engine, wish, self._check)
            if wish.echo is not None:
                self._items.put_nowait(TextDelta(index, before.text, before.likely))
        if not wish.writes:
            self._items.put_nowait(Completed(index, before.answer(self.engine), "", echo=before.text))
            return
        self._stream = stream = await asyncio.to_thread(self.engine.stream, wish.question, wish.ask)
        if self._is_over:
            stream.cancel()
        timers = loop.call_at(self._due_s, self.finish), loop.call_at(self._due_s + HARD_S, self._give_up)
        try:
            async for piece in stream.apieces():
                if isinstance(piece, Thought):
                    self._items.put_nowait(TextDelta(index, "", wish.likely(), piece.text))
                else:
                    said += len(piece)
                    self._items.put_nowait(TextDelta(index, piece, wish.likely()))
            answer = stream.answer
            rest, likely = answer.text[said:], wish.likely(answer)
            self._items.put_nowait(Completed(index, answer, rest, likely, self._is_late, before.text))
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
        """Give the reader an error now and cancel; the request's turn ends when the generation has."""
        self._items.put_nowait(_late())
        self.cancel()


@dataclass(frozen=True)
class Echo:
    """A prompt repeated before its answer, with its log probabilities."""

    text: str
    likely: Sequence[Likely]
    n_tokens: int = 0

    def answer(self, engine: Engine) -> Answer:
        """Return an answer of no tokens, for a request that only scores its prompt."""
        trace = Trace(engine.model.name, tokens=self.n_tokens, tokens_fresh=self.n_tokens)
        return Answer("", (), "length", trace)


def echoed(engine: Engine, wish: AnswerRequest, check: Callable[[], object]) -> Echo:
    """Return a prompt's text, with log probabilities from a separate forward pass if wanted.

    Args:
        engine: The tenant's engine.
        wish: The request.
        check: Called now and then while scoring; raises to stop it.
    """
    question: Any = wish.question
    ids = engine.ids(question)
    if wish.echo is None:
        return Echo("", (), len(ids))
    likely = of_prompt(engine.score(ids, wish.n_top, check)) if wish.n_top is not None else ()
    return Echo(wish.echo or engine.model.text(ids), likely, len(ids))


def _late() -> APIError:
    return APIError(504, "The answer did not begin in time. Ask for less, or later.", "timeout")


def _given_up() -> APIError:
    return APIError(503, "The answer was given up: the server is stopping.", "stopping")
