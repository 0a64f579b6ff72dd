"""What answers reused, for whoever asks from outside an index, a query engine, a chat engine or an agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ragfuse import Trace

_LISTENING: ContextVar[tuple[list[Trace], ...]] = ContextVar("ragfuse_traces", default=())


@contextmanager
def traces() -> Iterator[list[Trace]]:
    """A list that gets the trace of every answer that ends inside the `with`, or in tasks and threads begun there.

    Answers to other tasks and threads are not in it. A stream counts where it is read to its end.
    """
    seen: list[Trace] = []
    token = _LISTENING.set((*_LISTENING.get(), seen))
    try:
        yield seen
    finally:
        _LISTENING.reset(token)


def note(trace: Trace) -> None:
    """One more answer has ended."""
    for seen in _LISTENING.get():
        seen.append(trace)
