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
"""Seconds that an answer may take to end after its deadline."""


@dataclass(frozen=True)
class AnswerRequest:
    """One answer that is wanted; noted: where the probabilities of its tokens are, if they are wanted.

    echo: the prompt is said first, as this text, or as its tokens read where it is ""; None: it is not said. n_top:
    with how likely its tokens are, and so many others beside each. writes: False where nothing is wanted behind it.
    """

    question: Question
    ask: Ask
    noted: Noted | None = None
    echo: str | None = None
    n_top: int | None = None
    writes: bool = True

    def likely(self, answer: Answer | None = None) -> list[Likely]:
        """The tokens that came since the last time; with an answer, all that are left."""
        if self.noted is not None and answer is not None:
            self.noted.end(answer.token_ids)
        return self.noted.take() if self.noted is not None else []


@dataclass(frozen=True)
class TextDelta:
    """A piece of the text of one answer; likely: of tokens that are known by now; reasoning: a piece of thought."""

    index: int
    text: str
    likely: Sequence[Likely] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Completed:
    """A whole answer. rest: of its text, what was not said. is_late: its time was over before it ended by itself.

    echo: the prompt, where it is said before the answer.
    """

    index: int
    answer: Answer
    rest: str
    likely: Sequence[Likely] = ()
    is_late: bool = False
    echo: str = ""


class AnswerRun:
    """Writes the answers to some wishes, beginning at once; `done` is called when the last one is written or given up.

    due_s: on the event loop's clock. Then what is written so far is the answer; what has not begun is a Refusal (504).
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
        """Refusal where nothing more is wanted of it."""
        if self._is_over or self._is_late:
            raise _given_up() if self._is_over else _late()

    def _give_up(self) -> None:
        """Its reader waits no more; the turn ends when the writing does."""
        self._items.put_nowait(_late())
        self.cancel()


@dataclass(frozen=True)
class Echo:
    """What is said of a prompt before its answer."""

    text: str
    likely: Sequence[Likely]
    n_tokens: int = 0

    def answer(self, engine: Engine) -> Answer:
        """An answer of no tokens."""
        trace = Trace(engine.model.name, tokens=self.n_tokens, tokens_fresh=self.n_tokens)
        return Answer("", (), "length", trace)


def echoed(engine: Engine, wish: AnswerRequest, check: Callable[[], object]) -> Echo:
    """A prompt's text, and how likely its tokens are where that is wanted, by a forward of its own."""
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
