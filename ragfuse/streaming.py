"""An answer that is read while it is written."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from ragfuse.core import Answer
from ragfuse.errors import InputError


class AnswerStream:
    """Pieces of an answer's text. Closing it, or dropping it half read, ends the generation."""

    def __init__(self, run: Callable[[Callable[[str], None], threading.Event], Answer]) -> None:
        self._queue: queue.Queue[str | Answer | BaseException] = queue.Queue()
        self._gone = threading.Event()
        self._answer: Answer | None = None
        self._thread = threading.Thread(target=self._work, args=(run,), name="ragfuse-answer", daemon=True)
        self._thread.start()

    @property
    def answer(self) -> Answer:
        """The whole answer; waits for it."""
        for _ in self:
            pass
        if self._answer is None:
            raise InputError("The stream was closed before the answer was complete.")
        return self._answer

    def __iter__(self) -> Iterator[str]:
        while self._answer is None and not self._gone.is_set():
            item = self._queue.get()
            if isinstance(item, BaseException):
                self._gone.set()
                raise item
            if isinstance(item, Answer):
                self._answer = item
            else:
                yield item

    def close(self) -> None:
        """End the generation at the next token and wait for that."""
        self._gone.set()
        self._thread.join()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._gone.set()

    def _work(self, run: Callable[[Callable[[str], None], threading.Event], Answer]) -> None:
        try:
            self._queue.put(run(self._queue.put, self._gone))
        except BaseException as error:
            self._queue.put(error)
