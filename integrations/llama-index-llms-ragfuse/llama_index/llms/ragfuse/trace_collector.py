"""Collect the traces of answers, including those inside an index, query engine, chat engine or
agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ragfuse import Trace

_OPEN_LISTS: ContextVar[tuple[list[Trace], ...]] = ContextVar("ragfuse_traces", default=())


@contextmanager
def traces() -> Iterator[list[Trace]]:
    """Yield a list that receives the trace of every answer that ends in the block, or in tasks or
    threads started there.

    Answers in other tasks and threads are not included. A streamed answer counts when it has been
    read completely.
    """
    collected: list[Trace] = []
    token = _OPEN_LISTS.set((*_OPEN_LISTS.get(), collected))
    try:
        yield collected
    finally:
        _OPEN_LISTS.reset(token)


def note(trace: Trace) -> None:
    """Add the trace of a finished answer to all open lists of `traces` in this context."""
    for collected in _OPEN_LISTS.get():
        collected.append(trace)
