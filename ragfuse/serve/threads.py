"""Threads of a server by what they do, so that work of one kind never waits behind another kind's.

What is proportional to a request runs in its turn or one by one; what tells whether the server lives waits for neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
N_PLANNING = 2
"""Requests at once that are planned; their turns are more."""
N_LOOKUPS = 2
"""Requests at once that look at what is stored."""


class Threads:
    """Executors of one server.

    control: for whoever watches over it. intake: bodies, one at a time, so that little of the interpreter's time goes
    to them while others are answered. ahead: what requests that wait will read. planning: what a request
    asks for and what would be computed for it, of as many at once as gain by it: this is Python, of which one thread
    runs at a time. upkeep: quotas. lookups: what is stored. turns: for requests whose turn it is, two each, for writing
    and for what is left of the one before.
    """

    def __init__(self, together: int) -> None:
        self.control = _named("control", 2)
        self.intake = _named("intake", 1)
        self.ahead = _named("ahead", 1)
        self.upkeep = _named("upkeep", 1)
        self.planning = _named("planning", N_PLANNING)
        self.lookups = _named("lookups", N_LOOKUPS)
        self.turns = _named("turns", 2 * together + 2)

    async def run(self, where: ThreadPoolExecutor, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a call comes to on one of these; cancelled before it has begun, it never does."""
        return await asyncio.get_running_loop().run_in_executor(where, partial(do, *args, **kwargs))

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself."""
        for each in (self.intake, self.ahead, self.upkeep, self.planning, self.lookups, self.turns, self.control):
            each.shutdown(wait=False, cancel_futures=True)


def _named(what: str, n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix=f"ragfuse-{what}")
