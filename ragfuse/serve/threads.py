"""A server's thread pools, one for each kind of work, so that one kind never waits for another.

Work whose cost grows with a request runs when the request is admitted, or one at a time; health checks wait for
neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
N_PLANNING = 1
"""Requests planned at once: planning is Python code, which runs one thread at a time, so more threads gain nothing."""
N_LOOKUPS = 2
"""Requests at once that look up entries in the store."""
LITTLE, LATER = 5, 10
"""`nice` values of threads that generate answers, and of all other worker threads."""


class Threads:
    """The executors of one server.

    Args:
        together: Requests that run at once.

    Attributes:
        control: Monitoring, such as metrics.
        intake: Parsing of bodies, one at a time, so that it takes little interpreter time from running answers.
        ahead: Look-ahead: what waiting requests will read.
        planning: Conversion of requests, and plans for `/v1/ragfuse/explain`.
        upkeep: Tenants' quotas.
        lookups: Lookups in the store.
        turns: Running requests, two threads each: one to generate, one to finish the request before.
    """

    def __init__(self, together: int) -> None:
        self.control = _named("control", 2)
        self.intake = _named("intake", 1, _yield)
        self.ahead = _named("ahead", 1, _yield)
        self.upkeep = _named("upkeep", 1, _yield)
        self.planning = _named("planning", N_PLANNING, _yield)
        self.lookups = _named("lookups", N_LOOKUPS, _yield)
        self.turns = _named("turns", 2 * together + 2, partial(_yield, LITTLE))

    async def run(self, where: ThreadPoolExecutor, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call on one of these executors; a call cancelled before it begins never runs."""
        return await asyncio.get_running_loop().run_in_executor(where, partial(do, *args, **kwargs))

    def close(self) -> None:
        """Start no more calls; running calls end by themselves."""
        for each in (self.intake, self.ahead, self.upkeep, self.planning, self.lookups, self.turns, self.control):
            each.shutdown(wait=False, cancel_futures=True)


def _named(what: str, n: int, begin: Callable[[], object] | None = None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix=f"ragfuse-{what}", initializer=begin)


def _yield(later: int = LATER) -> None:
    """Lower this thread's priority, and that of threads it starts, so that the event loop runs first on a busy machine.

    Only Linux has priorities for single threads; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), later)
