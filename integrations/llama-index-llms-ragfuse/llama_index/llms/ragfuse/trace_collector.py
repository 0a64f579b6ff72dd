"""Collects the traces of answers, also of those inside an index, a query engine, a chat engine or
an agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ragfuse import Trace

_OPEN_LISTS: ContextVar[tuple[list[Trace], ...]] = ContextVar("ragfuse_traces", default=())


@contextmanager
def traces() -> Iterator[list[Trace]]:
    """Yield a list that receives the trace of every answer that ends in the `with`, or in tasks or
    threads begun there.

    Answers in other tasks and threads are not included. A stream counts where it is read to its
    end.
    """
    collected: list[Trace] = []
    token = _OPEN_LISTS.set((*_OPEN_LISTS.get(), collected))
    try:
        yield collected
    finally:
        _OPEN_LISTS.reset(token)


def note(trace: Trace) -> None:
    """Add the trace of a finished answer to all lists of `traces` that are open in this context."""
    for collected in _OPEN_LISTS.get():
        collected.append(trace)
