"""The request queue: the order of requests, and limits on concurrent and waiting requests.

Tenants take turns. The tenant whose last turn was longest ago is next: its oldest request starts.
A conversation's requests are served one after another, because each request continues the history.
Look-ahead uses the queue's order (`ragfuse.plan.controller`, AttentionStore 3.3).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from ragfuse.serve.refusals import APIError

RETRY_S = 5.0
"""Retry-After of rejected requests, in seconds."""
STOPPING = "The server is stopping and takes no more requests. Retry later, or ask another server."


@dataclass(eq=False, slots=True)
class Job:
    """A queued or running request. The future `turn` is resolved when the request may start."""

    turn: asyncio.Future[None]
    tenant: str
    conversation: str | None


class RequestQueue:
    """The waiting and running requests. Only one event loop changes them; any thread may read.

    Args:
        max_running: Maximum number of running requests.
        max_waiting: Maximum number of waiting requests.
        max_each: Maximum number of waiting requests per tenant. None means `max_waiting`.

    Attributes:
        running: The running requests.
        stopping: True if new requests are rejected.
    """

    def __init__(self, max_running: int, max_waiting: int, max_each: int | None = None) -> None:
        self.running: tuple[Job, ...] = ()
        self.stopping = False
        self._waiting: tuple[Job, ...] = ()  # in order of arrival
        self._max_running, self._max_waiting = max_running, max_waiting
        self._max_each = max_each or max_waiting
        self._turns = count(1)
        self._served = dict[str, int]()  # the number of the latest turn, by tenant

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def conversations(self) -> Sequence[tuple[str, str]]:
        """(tenant, conversation) pairs of running requests, then of waiting requests in order."""
        jobs = (*self.running, *self.ahead())
        found = ((job.tenant, job.conversation) for job in jobs if job.conversation is not None)
        return tuple(dict.fromkeys(found))

    def ahead(self) -> list[Job]:
        """Return the waiting requests in the order in which the requests will start."""
        before, places = Counter[str](), dict[Job, tuple[int, int]]()
        for job in self._waiting:
            places[job] = before[job.tenant], self._served.get(job.tenant, 0)
            before[job.tenant] += 1
        return sorted(places, key=places.__getitem__)

    def join(self, tenant: str, conversation: str | None = None) -> Job:
        """Add a request to the queue. Await the job's `turn`, do the work, then call `leave`.

        Args:
            tenant: The tenant's salt.
            conversation: Name of the conversation, or None. A conversation has one turn at a time.

        Raises:
            APIError: Too many requests wait (429), or the server is stopping (503).
        """
        if self.stopping:
            raise APIError(503, STOPPING, "stopping", None, RETRY_S)
        mine = sum(job.tenant == tenant for job in self._waiting)
        if len(self) >= self._max_waiting or mine >= self._max_each:
            raise APIError(
                429,
                f"Too many requests are waiting: {len(self)} (maximum {self._max_waiting}),"
                f" {mine} of them yours (maximum {self._max_each}). Retry in {RETRY_S:.0f} s.",
                "busy",
                None,
                RETRY_S,
            )
        job = Job(asyncio.get_running_loop().create_future(), tenant, conversation)
        self._waiting += (job,)
        self._call_next()
        return job

    def leave(self, job: Job) -> None:
        """End a request, and start waiting requests if there is room. Idempotent."""
        self._waiting = tuple(each for each in self._waiting if each is not job)
        self.running = tuple(each for each in self.running if each is not job)
        self._call_next()

    def stop(self) -> None:
        """Reject new requests, and fail waiting requests with APIError (503)."""
        self.stopping = True
        for job in self._waiting:
            if not job.turn.done():
                job.turn.set_exception(APIError(503, STOPPING, "stopping", None, RETRY_S))

    def _call_next(self) -> None:
        while len(self.running) < self._max_running:
            busy = {(job.tenant, job.conversation) for job in self.running if job.conversation}
            free = [job for job in self._waiting if (job.tenant, job.conversation) not in busy]
            if not free:
                return
            next_job = min(free, key=lambda job: self._served.get(job.tenant, 0))
            self._waiting = tuple(job for job in self._waiting if job is not next_job)
            if not next_job.turn.done():  # otherwise the request was just cancelled
                self._served[next_job.tenant] = next(self._turns)
                self.running += (next_job,)
                next_job.turn.set_result(None)
