"""Admission control: how many requests run at once, which one is next, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ragfuse.errors import BusyError
from ragfuse.serve import request_queue
from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import RETRY_S, JobQueue

Job = request_queue.Job[asyncio.Future[None]]
"""A request with a future that is resolved when it may run."""

STOPPING = "The server is stopping and takes no more requests. Retry later, or ask another server."


class AdmissionControl:
    """Admits requests in the queue's order. Use it from one event loop only, except where a method
    says otherwise.

    Args:
        max_running: Requests that run at once; others wait.
        max_waiting: Most requests that wait.
        max_each: Most requests of one tenant that wait; None: as many as `max_waiting`.
    """

    def __init__(self, max_running: int, max_waiting: int, max_each: int | None = None) -> None:
        self.jobs: JobQueue[asyncio.Future[None]] = JobQueue(max_waiting, max_each)
        self.stopping = False
        self._max_running = max_running

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not len(self.jobs) and not self.jobs.running

    @property
    def conversations(self) -> Sequence[tuple[str, str]]:
        """The conversations of running requests, then those of waiting ones in the order in which
        they will run.

        Any thread may ask.
        """
        jobs = (*self.jobs.running, *self.jobs.ahead())
        return tuple(dict.fromkeys(job.reads for job in jobs if job.reads is not None))

    def join(self, tenant: str, conversation: str | None = None) -> Job:
        """Queue a request: its `work` is resolved once it may run. Its caller ends it with `leave`.

        Args:
            tenant: Name of the tenant.
            conversation: The request's conversation; only one request of a conversation runs at a
                time.

        Raises:
            APIError: Too many requests wait (429), or the server is stopping (503).
        """
        if self.stopping:
            raise APIError(503, STOPPING, "stopping", None, RETRY_S)
        try:
            job = self.jobs.submit(asyncio.get_running_loop().create_future(), tenant, conversation)
        except BusyError as error:
            raise APIError(429, str(error), "busy", None, error.wait_s) from error
        self._call_next()
        return job

    def leave(self, job: Job) -> None:
        """End a request, whether it was answered, waits still or was given up, and admit the next
        one.
        """
        self.jobs.cancel(job)
        self.jobs.done(job)
        self._call_next()

    def stop(self) -> None:
        """Admit no more requests; those that wait fail with APIError (503)."""
        self.stopping = True
        for job in self.jobs.ahead():
            if not job.work.done():
                job.work.set_exception(APIError(503, STOPPING, "stopping", None, RETRY_S))

    def _call_next(self) -> None:
        while len(self.jobs.running) < self._max_running and (job := self.jobs.take()) is not None:
            if job.work.done():  # cancelled just now
                self.jobs.done(job)
            else:
                job.work.set_result(None)
