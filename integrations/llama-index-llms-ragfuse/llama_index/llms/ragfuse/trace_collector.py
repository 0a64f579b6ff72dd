"""Collect the traces of answers, including those inside a query engine, chat engine or agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ragfuse import Trace

_OPEN_LISTS: ContextVar[tuple[list[Trace], ...]] = ContextVar("ragfuse_traces", default=())


@contextmanager
def traces() -> Iterator[list[Trace]]:
    """Yield a list to which the trace of every answer in the `with` block is added.

    Answers in tasks and threads that the block starts are included. A streamed answer's trace is
    added when the stream has been read completely.
    """
    collected: list[Trace] = []
    token = _OPEN_LISTS.set((*_OPEN_LISTS.get(), collected))
    try:
        yield collected
    finally:
        _OPEN_LISTS.reset(token)


def note(trace: Trace) -> None:
    """Add the trace of a finished answer to the list of each `traces` block around the call."""
    for collected in _OPEN_LISTS.get():
        collected.append(trace)
