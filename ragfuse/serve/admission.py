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

ConversationId = tuple[str, str]
"""A conversation: its tenant's salt, and its session's name."""

STOPPING = "The server is stopping and takes no more requests. Retry later, or ask another server."
RETRY_S = 5.0
"""Seconds after which clients of a stopping server should retry."""


class AdmissionControl:
    """Admits requests in the queue's order. Use it from one event loop only, except where a method says otherwise.

    Args:
        max_running: Requests that run at once; others wait.
        max_waiting: Most requests that wait.
        max_each: Most requests of one tenant that wait; None: as many as `max_waiting`.
    """

    def __init__(self, max_running: int, max_waiting: int, max_each: int | None = None) -> None:
        self.jobs: JobQueue[Ticket] = JobQueue(max_waiting, time.monotonic, max_each)
        self._max_running = max_running
        self._conversations: dict[int, ConversationId] = {}
        self._open: set[int] = set()
        self.stopping = False

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not len(self.jobs) and not self.jobs.running

    @property
    def conversations(self) -> Sequence[ConversationId]:
        """The conversations of running requests, then those of waiting ones in the order in which they will run."""
        ahead = [job.number for job in self.jobs.ahead()]
        waiting = set(ahead)
        found = [conversation for number, conversation in list(self._conversations.items()) if number not in waiting]
        found += [self._conversations[number] for number in ahead if number in self._conversations]
        return tuple(dict.fromkeys(found))

    def note(self, job: Job[Ticket], conversation: ConversationId) -> None:
        """Record which conversation's KV a request will read. May be called from any thread."""
        self._conversations[job.number] = conversation
        if job.number not in self._open:  # it has ended in the meantime
            self._conversations.pop(job.number, None)

    async def enter(
        self, tenant: str, conversation: str | None, on_wait: Callable[[Job[Ticket]], object]
    ) -> Job[Ticket]:
        """Wait until the request may run; its caller ends it with `leave`.

        Args:
            tenant: Name of the tenant.
            conversation: The request's conversation; only one request of a conversation runs at a time.
            on_wait: Called with the job before waiting, unless the request may run at once.

        Raises:
            APIError: Too many requests wait (429), or the server is stopping (503).
        """
        if self.stopping:
            raise APIError(503, STOPPING, "stopping", None, RETRY_S)
        ticket: Ticket = asyncio.get_running_loop().create_future()
        try:
            job = self.jobs.submit(ticket, tenant, conversation)
        except BusyError as error:
            raise APIError(429, str(error), "busy", None, error.wait_s) from error
        self._open.add(job.number)
        self._call_next()
        try:
            if not ticket.done():
                on_wait(job)
            await ticket
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
            if not job.work.done():
                job.work.set_exception(APIError(503, STOPPING, "stopping", None, RETRY_S))

    def _forget(self, job: Job[Ticket]) -> None:
        self._open.discard(job.number)
        self._conversations.pop(job.number, None)

    def _call_next(self) -> None:
        while self.jobs.running < self._max_running and (job := self.jobs.take()) is not None:
            if job.work.done():  # cancelled just now
                self.jobs.done(job)
            else:
                job.work.set_result(None)
