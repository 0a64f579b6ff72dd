"""An answer that is streamed while a background thread generates it."""

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
"""Generates an answer: passes each piece of reasoning or text to the callback, and ends early once the event is set."""


class StopSignal(threading.Event):
    """An event that ends an answer at the next token.

    Attributes:
        is_gone: Whether it was set because nobody reads the answer any more, so that the answer is discarded.
    """

    is_gone = False


class AnswerStream:
    """The pieces of an answer's text as they are generated, for `for` or `async for`.

    Closing the stream, or dropping it half read, ends the generation. `pieces` and `apieces` also yield the reasoning
    of models that write it apart from the answer.

    Args:
        run: Generates the answer; called in a thread of its own, at once.
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
        """After a fork, end the child's copy with an error: the parent generates the rest. A finished answer stays."""
        before = list(self._line.items.queue)
        self._line.items, self._line.enough, self._line.wake = queue.Queue(), StopSignal(), lambda: None
        for item in before:
            self._line.items.put(item)
        if not any(isinstance(item, Answer | BaseException) for item in before):
            what = "This answer is being written by the process that this one was forked from. Ask again here."
            self._line.items.put(InputError(what))

    @property
    def answer(self) -> Answer:
        """The whole answer. Waits for its end; raises the error if the generation failed."""
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
        """Yield reasoning (`Thought`) and text (`str`) as they are generated."""
        while self._is_open:
            item = self._opened(self._line.items.get())
            if item is not None:
                yield item

    async def apieces(self) -> AsyncIterator[Piece]:
        """Yield the same asynchronously, without blocking the event loop."""
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
        """End the generation at the next token and discard the answer, without waiting."""
        self._line.leave()

    def finish(self) -> None:
        """End the generation at the next token and keep what was generated as the answer, also in its conversation.

        An answer that has not started raises InputError for its reader.
        """
        self._line.enough.set()

    def close(self) -> None:
        """End the generation at the next token, discard the answer, and wait for the thread."""
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
        """Return a piece; None at the end, which is put back into the queue for other readers."""
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
    """The state that the generating thread shares with the reader.

    The thread holds no reference to the stream itself, so that a dropped stream is garbage collected and noticed.
    """

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
        """Note that nobody reads any more, which ends the generation."""
        self.left = self.enough.is_gone = True
        self.enough.set()


def _work(run: Run, line: _Line) -> None:
    try:
        line.put(run(line.put, line.enough))
    except BaseException as error:
        line.put(error)
