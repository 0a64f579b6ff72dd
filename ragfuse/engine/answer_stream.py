"""An answer that is streamed while a background thread generates it."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

from ragfuse.errors import InputError
from ragfuse.process.jobs import release_pool, start_thread
from ragfuse.types.answer import Answer, Thought

Piece = str | Thought
Run = Callable[[Callable[[Piece], None], threading.Event], Answer]
"""Generates an answer: passes each piece to the callback; ends early once the event is set."""


class StopSignal(threading.Event):
    """An event that ends an answer at the next token.

    Attributes:
        is_abandoned: True if it was set because nobody reads the answer any more, so that the
            answer is discarded.
    """

    is_abandoned = False


def answers_of(futures: Sequence[Future[Answer]], failed: threading.Event) -> list[Answer]:
    """Return the answers that several threads make; where one fails, or the wait is interrupted,
    end the others too.

    Args:
        futures: The answers to come.
        failed: The event that ends them.
    """
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    except BaseException:
        failed.set()
        raise


class AnswerStream:
    """The pieces of an answer's text as they are generated, for `for` or `async for`.

    Closing the stream, or dropping it half read, ends the generation. `pieces` and `apieces` also
    yield the reasoning of models that write it apart from the answer.

    Args:
        run: Generates the answer; called at once, in a new thread.
    """

    def __init__(self, run: Run) -> None:
        self._channel = _Channel()
        self._end: Answer | BaseException | None = None
        # the answer's telemetry spans belong to the caller's current span
        context = contextvars.copy_context()
        work = (_work, run, self._channel)
        release_pool()
        self._thread = start_thread("answer", context.run, *work)

    @property
    def answer(self) -> Answer:
        """The whole answer. Waits for its end; raises the error if the generation failed."""
        for _ in self:
            pass
        if isinstance(self._end, BaseException):
            raise self._end
        if self._end is None:
            raise InputError(
                "The stream was closed before the answer was complete. Ask again; finish() instead"
                " of close() keeps what was generated."
            )
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
            item = self._opened(self._channel.items.get())
            if item is not None:
                yield item

    async def apieces(self) -> AsyncIterator[Piece]:
        """Yield the same asynchronously, without blocking the event loop."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._channel.wake = lambda: loop.call_soon_threadsafe(news.set)
        while self._is_open:
            news.clear()
            try:
                item = self._opened(self._channel.items.get_nowait())
            except queue.Empty:
                await news.wait()
                continue
            if item is not None:
                yield item

    def cancel(self) -> None:
        """End the generation at the next token and discard the answer, without waiting."""
        self._channel.close()

    def finish(self) -> None:
        """End the generation at the next token and keep the answer, also in its conversation.

        An answer that has not started raises InputError for its reader.
        """
        self._channel.stop.set()

    def close(self) -> None:
        """End the generation at the next token, discard the answer, and wait for the thread."""
        self.cancel()
        self._thread.join()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    @property
    def _is_open(self) -> bool:
        return self._end is None and not self._channel.is_closed

    def _opened(self, item: Piece | Answer | BaseException) -> Piece | None:
        """Return a piece; None at the end, which is put back into the queue for other readers."""
        if isinstance(item, str | Thought):
            return item
        self._channel.items.put(item)
        if isinstance(item, BaseException):
            self._end = item
            raise item
        if not self._channel.is_closed:  # else it was cut short
            self._end = item
        return None


class _Channel:
    """State shared with the generating thread, which must not keep a dropped stream alive.

    The thread holds no reference to the stream itself, so that a dropped stream is garbage
    collected and noticed.
    """

    def __init__(self) -> None:
        self.items: queue.Queue[Piece | Answer | BaseException] = queue.Queue()
        self.stop = StopSignal()
        self.is_closed = False
        self.wake: Callable[[], object] = lambda: None

    def put(self, item: Piece | Answer | BaseException) -> None:
        self.items.put(item)
        try:
            self.wake()
        except RuntimeError:  # the reader's event loop is closed: nobody listens
            self.close()

    def close(self) -> None:
        self.is_closed = self.stop.is_abandoned = True
        self.stop.set()


def _work(run: Run, channel: _Channel) -> None:
    try:
        channel.put(run(channel.put, channel.stop))
    except BaseException as error:
        channel.put(error)
