"""Who is answered next: so many at a time, tenants in turns, and no more waiting than there is room for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ragfuse.errors import BusyError
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import Job, JobQueue

Ticket = asyncio.Future[None]
"""Set when it is somebody's turn."""

Reads = tuple[str, str]
"""A conversation: its tenant's salt, and its session's name."""

STOPPING = "The server is stopping and takes no more requests; ask another one, or this one later."
RETRY_S = 5.0
"""When to look again for a server that is stopping."""


class AdmissionControl:
    """Lets requests through in the queue's order. All of it runs on one event loop.

    together: requests that are answered at once; the others wait. most_each: of one tenant that wait.
    """

    def __init__(self, together: int, waiting: int, most_each: int | None = None) -> None:
        self.jobs: JobQueue[Ticket] = JobQueue(waiting, time.monotonic, most_each)
        self._together = together
        self._reads: dict[int, Reads] = {}
        self._inside: set[int] = set()
        self.stopping = False

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nobody is answered."""
        return not len(self.jobs) and not self.jobs.running

    @property
    def reading(self) -> Sequence[Reads]:
        """The conversations that requests are answered in now, then those that wait, in the order of their turns."""
        waiting = [job.number for job in self.jobs.ahead()]
        behind = set(waiting)
        told = [reads for number, reads in list(self._reads.items()) if number not in behind]
        told += [self._reads[number] for number in waiting if number in self._reads]
        return tuple(dict.fromkeys(told))

    def note(self, job: Job[Ticket], reads: Reads) -> None:
        """Which conversation's KV a request reads when its turn comes; from any thread."""
        self._reads[job.number] = reads
        if job.number not in self._inside:  # gone meanwhile
            self._reads.pop(job.number, None)

    async def enter(self, tenant: str, conversation: str | None, waits: Callable[[Job[Ticket]], object]) -> Job[Ticket]:
        """Wait for a turn, which ends with `leave`; `waits` is called first if it does not come at once.

        Refusal with 429 where too many wait already, with 503 where the server stops.
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
        """This request is answered, or will not be; the next one's turn comes."""
        self.jobs.done(job)
        self._forget(job)
        self._call_next()

    def stop(self) -> None:
        """Let nobody in any more; those that wait are told so."""
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
            if job.what.done():  # gone in this very moment
                self.jobs.done(job)
            else:
                job.what.set_result(None)
