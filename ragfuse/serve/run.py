"""Answers of one request, written one behind the other in the background and read by whoever sends them on.

The reader may be slow or go away: a turn ends when the last answer is written, whether it was read or not, and going
away ends the writing at the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ragfuse.asking import Ask
from ragfuse.core import Answer
from ragfuse.engine import Engine
from ragfuse.prompting import Inquiry
from ragfuse.serve.logprobs import Likely, Noted
from ragfuse.serve.refusals import Refusal
from ragfuse.streaming import AnswerStream

HARD_S = 5.0
"""How long an answer may take to end once its time is over."""


@dataclass(frozen=True)
class Wish:
    """One answer that is wanted; noted: where the probabilities of its tokens are, if they are wanted."""

    question: Inquiry
    ask: Ask
    noted: Noted | None = None

    def likely(self, answer: Answer | None = None) -> list[Likely]:
        """The tokens that came since the last time; with an answer, all that are left."""
        if self.noted is not None and answer is not None:
            self.noted.end(answer.token_ids)
        return self.noted.take() if self.noted is not None else []


@dataclass(frozen=True)
class Said:
    """A piece of the text of one answer; likely: of tokens that are known by now."""

    index: int
    text: str
    likely: Sequence[Likely] = ()


@dataclass(frozen=True)
class Written:
    """A whole answer. rest: of its text, what was not said. is_late: its time was over before it ended by itself."""

    index: int
    answer: Answer
    rest: str
    likely: Sequence[Likely] = ()
    is_late: bool = False


class Run:
    """Writes the answers to some wishes, beginning at once; `done` is called when the last one is written or given up.

    due_s: on the event loop's clock. Then what is written so far is the answer; what has not begun is a Refusal (504).
    """

    def __init__(self, wishes: Sequence[Wish], engine: Engine, due_s: float, done: Callable[[], object]) -> None:
        self.engine = engine
        self._wishes, self._due_s, self._done = wishes, due_s, done
        self._items: asyncio.Queue[Said | Written | BaseException | None] = asyncio.Queue()
        self._is_late = self._is_over = False
        self._stream: AnswerStream | None = None
        self._task = asyncio.get_running_loop().create_task(self._write())

    async def read(self) -> AsyncIterator[Said | Written]:
        """Pieces and answers as they come; raises what ended them."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def finish(self) -> None:
        """The time is over: what is written is the answer."""
        self._is_late = True
        if self._stream is not None:
            self._stream.finish()

    def cancel(self) -> None:
        """Write no more. The turn ends when what is being computed has ended, however often this is called."""
        self._is_over = True
        if self._stream is not None:
            self._stream.cancel()

    async def ended(self) -> None:
        """Wait until nothing is written any more."""
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

    async def _one(self, index: int, wish: Wish) -> None:
        loop, said = asyncio.get_running_loop(), 0
        self._stream = stream = await asyncio.to_thread(self.engine.stream, wish.question, wish.ask)
        if self._is_over:
            stream.cancel()
        timers = loop.call_at(self._due_s, self.finish), loop.call_at(self._due_s + HARD_S, self._give_up)
        try:
            async for text in stream:
                said += len(text)
                self._items.put_nowait(Said(index, text, wish.likely()))
            answer = stream.answer
            rest, likely = answer.text[said:], wish.likely(answer)
            self._items.put_nowait(Written(index, answer, rest, likely, self._is_late))
        finally:
            for timer in timers:
                timer.cancel()
            stream.cancel()
            await asyncio.to_thread(stream.close)

    def _give_up(self) -> None:
        """Its reader waits no more; the turn ends when the writing does."""
        self._items.put_nowait(_late())
        self.cancel()


def _late() -> Refusal:
    return Refusal(504, "The answer did not begin in time. Ask for less, or later.", "timeout")


def _given_up() -> Refusal:
    return Refusal(503, "The answer was given up: the server is stopping.", "stopping")
