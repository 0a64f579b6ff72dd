"""A server's thread pools, one for each kind of work, so that one kind never waits for another.

Work whose cost grows with the size of a request runs only once the request is admitted, or one
request at a time; health checks wait for neither.
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
from typing import TypeVar

T = TypeVar("T")
N_PLANNING = 1
"""Requests planned at once: planning is Python code, which runs one thread at a time, so more
threads gain nothing.
"""
N_LOOKUPS = 2
"""Requests at once that look up entries in the store."""
ANSWER_NICE, WORKER_NICE = 5, 10
"""`nice` values of threads that generate answers, and of all other worker threads."""


class Threads:
    """The executors of one server.

    Args:
        together: Requests that run at once.

    Attributes:
        control: For monitoring, such as metrics.
        intake: For parsing bodies, one at a time, so that it takes little interpreter time from
            running answers.
        ahead: For what is done in the background: look-ahead, tenants' quotas.
        planning: For converting requests.
        lookups: For lookups in the store.
        turns: For running requests, two threads each: one to generate, one to finish the request
            before.
    """

    def __init__(self, together: int) -> None:
        self.control = _executor("control", 2)
        self.intake = _executor("intake", 1, _lower_priority)
        self.ahead = _executor("ahead", 1, _lower_priority)
        self.planning = _executor("planning", N_PLANNING, _lower_priority)
        self.lookups = _executor("lookups", N_LOOKUPS, _lower_priority)
        self.turns = _executor("turns", 2 * together + 2, partial(_lower_priority, ANSWER_NICE))

    async def run(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        """Return the result of `call` on one of these executors; cancelled before it begins, it
        never runs.
        """
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    def close(self) -> None:
        """Start no more calls; running calls end by themselves."""
        for each in vars(self).values():
            each.shutdown(wait=False, cancel_futures=True)


def _executor(
    name: str, n: int, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix=f"ragfuse-{name}", initializer=initializer)


def _lower_priority(nice: int = WORKER_NICE) -> None:
    """Lower this thread's priority, and that of threads it starts, so that the event loop runs
    first on a busy machine.

    Only Linux has priorities for single threads; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
