"""An answer that is read while it is written."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from ragfuse.errors import InputError
from ragfuse.process.fork import at_fork
from ragfuse.types.answer import Answer, Thought

Piece = str | Thought
Run = Callable[[Callable[[Piece], None], threading.Event], Answer]
"""Writes an answer: says its thoughts and its text piece by piece, and ends early once the event is set."""


class StopSignal(threading.Event):
    """Set: an answer ends at the next token. is_gone: as nobody reads it any more, so that it is none."""

    is_gone = False


class AnswerStream:
    """Pieces of an answer's text, by `for` or `async for`; closing it or dropping it half read ends the generation.

    `pieces` and `apieces` have what was thought before, too, where a model writes its thoughts apart.
    """

    def __init__(self, run: Run) -> None:
        self._line = _Line()
        self._end: Answer | BaseException | None = None
        begun_in = contextvars.copy_context()  # whose span the answer's spans are under
        work = (_work, run, self._line)
        self._thread = threading.Thread(target=begun_in.run, args=work, name="ragfuse-answer", daemon=True)
        self._thread.start()
        at_fork(self)

    def renew(self) -> None:
        """Say in a forked process that the rest is written in the other one; what was whole before stays."""
        before = list(self._line.items.queue)
        self._line.items, self._line.enough, self._line.wake = queue.Queue(), StopSignal(), lambda: None
        for item in before:
            self._line.items.put(item)
        if not any(isinstance(item, Answer | BaseException) for item in before):
            what = "This answer is being written by the process that this one was forked from. Ask again here."
            self._line.items.put(InputError(what))

    @property
    def answer(self) -> Answer:
        """The whole answer; waits for it, and raises what ended it instead."""
        for _ in self:
            pass
        if isinstance(self._end, BaseException):
            raise self._end
        if self._end is None:
            raise InputError("The stream was closed before the answer was complete.")
        return self._end

    def __iter__(self) -> Iterator[str]:
        return (piece for piece in self.pieces() if isinstance(piece, str))

    async def __aiter__(self) -> AsyncIterator[str]:
        async for piece in self.apieces():
            if isinstance(piece, str):
                yield piece

    def pieces(self) -> Iterator[Piece]:
        """Thoughts and text as they are written."""
        while self._is_open:
            item = self._opened(self._line.items.get())
            if item is not None:
                yield item

    async def apieces(self) -> AsyncIterator[Piece]:
        """The same, leaving the event loop free."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._line.wake = lambda: loop.call_soon_threadsafe(news.set)
        while self._is_open:
            news.clear()
            try:
                item = self._opened(self._line.items.get_nowait())
            except queue.Empty:
                await news.wait()
                continue
            if item is not None:
                yield item

    def cancel(self) -> None:
        """End the generation at the next token, without waiting for that."""
        self._line.leave()

    def finish(self) -> None:
        """End the generation at the next token; what is written until then is the answer, in its conversation too. One
        that has not begun is an InputError for its reader."""
        self._line.enough.set()

    def close(self) -> None:
        """End the generation at the next token and wait for that."""
        self.cancel()
        self._thread.join()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()

    @property
    def _is_open(self) -> bool:
        return self._end is None and not self._line.left

    def _opened(self, item: Piece | Answer | BaseException) -> Piece | None:
        """A piece; None at the end, which stays in the line for whoever else waits there."""
        if isinstance(item, str | Thought):
            return item
        self._line.items.put(item)
        if isinstance(item, BaseException):
            self._end = item
            raise item
        if not self._line.left:  # else it was cut short
            self._end = item
        return None


class _Line:
    """What the writing thread and the reader share: the thread knows nothing else, so a dropped stream is noticed."""

    def __init__(self) -> None:
        self.items: queue.Queue[Piece | Answer | BaseException] = queue.Queue()
        self.enough = StopSignal()
        self.left = False
        self.wake: Callable[[], object] = lambda: None

    def put(self, item: Piece | Answer | BaseException) -> None:
        self.items.put(item)
        try:
            self.wake()
        except RuntimeError:  # the reader's event loop is closed: nobody listens
            self.leave()

    def leave(self) -> None:
        """Nobody reads any more."""
        self.left = self.enough.is_gone = True
        self.enough.set()


def _work(run: Run, line: _Line) -> None:
    try:
        line.put(run(line.put, line.enough))
    except BaseException as error:
        line.put(error)
