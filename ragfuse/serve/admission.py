"""Admission control: how many requests run at once, which one is next, and how many may wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ragfuse.errors import BusyError
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import Job, JobQueue

Ticket = asyncio.Future[None]
"""A future of one waiting request, resolved when it may run."""

Reads = tuple[str, str]
"""A conversation: its tenant's salt, and its session's name."""

STOPPING = "The server is stopping and takes no more requests; ask another one, or this one later."
RETRY_S = 5.0
"""Seconds after which clients of a stopping server should retry."""


class AdmissionControl:
    """Admits requests in the queue's order. Use it from one event loop only, except where a method says otherwise.

    Args:
        together: Requests that run at once; others wait.
        waiting: Requests that wait, at most.
        most_each: Requests of one tenant that wait, at most; None: as many as `waiting`.
    """

    def __init__(self, together: int, waiting: int, most_each: int | None = None) -> None:
        self.jobs: JobQueue[Ticket] = JobQueue(waiting, time.monotonic, most_each)
        self._together = together
        self._reads: dict[int, Reads] = {}
        self._inside: set[int] = set()
        self.stopping = False

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not len(self.jobs) and not self.jobs.running

    @property
    def reading(self) -> Sequence[Reads]:
        """The conversations of running requests, then those of waiting ones in the order in which they will run."""
        waiting = [job.number for job in self.jobs.ahead()]
        behind = set(waiting)
        told = [reads for number, reads in list(self._reads.items()) if number not in behind]
        told += [self._reads[number] for number in waiting if number in self._reads]
        return tuple(dict.fromkeys(told))

    def note(self, job: Job[Ticket], reads: Reads) -> None:
        """Record which conversation's KV a request will read. May be called from any thread."""
        self._reads[job.number] = reads
        if job.number not in self._inside:  # gone meanwhile
            self._reads.pop(job.number, None)

    async def enter(self, tenant: str, conversation: str | None, waits: Callable[[Job[Ticket]], object]) -> Job[Ticket]:
        """Wait until the request may run; its caller ends it with `leave`.

        Args:
            tenant: Name of the tenant.
            conversation: The request's conversation; only one request of a conversation runs at a time.
            waits: Called with the job before waiting, unless the request may run at once.

        Raises:
            APIError: Too many requests wait (429), or the server is stopping (503).
        """
        if self.stopping:
            raise APIError(503, STOPPING, "stopping", None, RETRY_S)
        turn: Ticket = asyncio.get_running_loop().create_future()
        try:
            job = self.jobs.submit(turn, tenant, conversation)
        except BusyError as error:
            raise APIError(429, str(error), "busy", None, error.wait_s) from error
        self._inside.add(job.number)
        self._call_next()
        try:
            if not turn.done():
                waits(job)
            await turn
        except BaseException:
            if self.jobs.cancel(job):
                self._forget(job)
            else:
                self.leave(job)
            raise
        return job

    def leave(self, job: Job[Ticket]) -> None:
        """End a request, answered or not, and admit the next one."""
        self.jobs.done(job)
        self._forget(job)
        self._call_next()

    def stop(self) -> None:
        """Admit no more requests; those that wait fail with APIError (503)."""
        if self.stopping:
            return
        self.stopping = True
        for job in self.jobs.close():
            if not job.what.done():
                job.what.set_exception(APIError(503, STOPPING, "stopping", None, RETRY_S))

    def _forget(self, job: Job[Ticket]) -> None:
        self._inside.discard(job.number)
        self._reads.pop(job.number, None)

    def _call_next(self) -> None:
        while self.jobs.running < self._together and (job := self.jobs.take(0)) is not None:
            if job.what.done():  # cancelled in this very moment
                self.jobs.done(job)
            else:
                job.what.set_result(None)
