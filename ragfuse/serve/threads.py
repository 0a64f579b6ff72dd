"""Threads of a server by what they do, so that work of one kind never waits behind another kind's.

What is proportional to a request runs in its turn or one by one; what tells whether the server lives waits for neither.
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
"""Requests at once that are planned: this is Python, of which one thread runs at a time, and more only wait longer."""
N_LOOKUPS = 2
"""Requests at once that look at what is stored."""
LITTLE, LATER = 5, 10
"""How much later threads come to run that write answers, and those that work beside them, as `nice` counts it."""


class Threads:
    """Executors of one server.

    control: for whoever watches over it. intake: bodies, one at a time, so that little of the interpreter's time goes
    to them while others are answered. ahead: what requests that wait will read. planning: what a request asks for and
    what would be computed for it. upkeep: quotas. lookups: what is stored. turns: for requests whose turn it is, two
    each, for writing and for what is left of the one before.
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
        """What a call comes to on one of these; cancelled before it has begun, it never does."""
        return await asyncio.get_running_loop().run_in_executor(where, partial(do, *args, **kwargs))

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        for each in (self.intake, self.ahead, self.upkeep, self.planning, self.lookups, self.turns, self.control):
            each.shutdown(wait=False, cancel_futures=True)


def _named(what: str, n: int, begin: Callable[[], object] | None = None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix=f"ragfuse-{what}", initializer=begin)


def _yield(later: int = LATER) -> None:
    """Let this thread run after others where there are more than the machine has cores: what waits for it can wait, and
    the event loop cannot. So do the threads that it computes with. Linux alone has that for a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), later)
