"""A bounded queue of requests that is fair among tenants and can be inspected.

It only holds values and runs nothing. Look-ahead prefetching and eviction use the order of the
waiting jobs (`ragfuse.plan.look_ahead`, AttentionStore section 3.3).

The next job is the first one of the tenant that was served longest ago, so that a new tenant's
first job waits for at most one job of each other tenant, however many one of them has sent. A
tenant's own jobs run in order of arrival, but a job waits while another one of its conversation
runs, because each turn continues from the history with the turn before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from threading import RLock
from typing import Generic, TypeVar

from ragfuse.errors import BusyError

T = TypeVar("T")
RETRY_S = 5.0
"""Seconds after which those who were refused should ask again."""


@dataclass(slots=True)
class Job(Generic[T]):
    """A request that waits or runs.

    Args:
        number: Its number, in order of arrival.
        work: The work.
        tenant: Whose it is.
        conversation: The name of its conversation; None for none.
        reads: The tenant's salt and the session whose KV it will read, as far as is known. Any
            thread may set it.
    """

    number: int
    work: T
    tenant: str
    conversation: Hashable | None
    reads: tuple[str, str] | None = None


class JobQueue(Generic[T]):
    """A queue of jobs by tenant. Thread-safe.

    Args:
        max_waiting: Most jobs that wait at once.
        max_each: Most waiting jobs of one tenant; None: `max_waiting`.
    """

    def __init__(self, max_waiting: int, max_each: int | None = None) -> None:
        self._max_waiting, self._max_each = max_waiting, max_each or max_waiting
        self._lock = RLock()
        # the tenant served next comes first
        self._tenants: OrderedDict[str, OrderedDict[int, Job[T]]] = OrderedDict()
        self._running: dict[int, Job[T]] = {}
        self._number = 0

    def __len__(self) -> int:
        """Return how many jobs wait."""
        with self._lock:
            return sum(map(len, self._tenants.values()))

    @property
    def running(self) -> Sequence[Job[T]]:
        """The jobs that were taken and are not done."""
        with self._lock:
            return tuple(self._running.values())

    def submit(self, work: T, tenant: str = "", conversation: Hashable | None = None) -> Job[T]:
        """Add a job; raise BusyError where the queue is full."""
        with self._lock:
            mine = len(self._tenants.get(tenant, ()))
            if len(self) >= self._max_waiting or mine >= self._max_each:
                raise BusyError(
                    f"The queue is full: {len(self)} requests wait, {mine} of them yours, of at"
                    f" most {self._max_waiting} and {self._max_each}. Retry in {RETRY_S:.0f} s.",
                    RETRY_S,
                )
            self._number += 1
            job = Job(self._number, work, tenant, conversation)
            self._tenants.setdefault(tenant, OrderedDict())[job.number] = job
            return job

    def take(self) -> Job[T] | None:
        """Return the next job, which counts as running from now on; None where none may run now."""
        with self._lock:
            busy = {
                (job.tenant, job.conversation)
                for job in self._running.values()
                if job.conversation is not None
            }
            waiting = (job for jobs in self._tenants.values() for job in jobs.values())
            job = next((job for job in waiting if (job.tenant, job.conversation) not in busy), None)
            if job is not None:
                self._tenants.move_to_end(job.tenant)
                self._remove(job)
                self._running[job.number] = job
            return job

    def done(self, job: Job[T]) -> None:
        """Note that a taken job has ended, successfully or not; further calls do nothing."""
        with self._lock:
            self._running.pop(job.number, None)

    def cancel(self, job: Job[T]) -> bool:
        """Remove a waiting job; return False where it does not wait any more. A running job is not
        stopped.
        """
        with self._lock:
            is_waiting = job.number in self._tenants.get(job.tenant, ())
            if is_waiting:
                self._remove(job)
            return is_waiting

    def ahead(self) -> tuple[Job[T], ...]:
        """Return the waiting jobs in the order in which they would be taken.

        That order assumes that no further job comes, and that no job has to wait for another of its
        conversation.
        """
        with self._lock:
            turns = zip_longest(*(jobs.values() for jobs in self._tenants.values()))
            return tuple(job for turn in turns for job in turn if job is not None)

    def _remove(self, job: Job[T]) -> None:
        del self._tenants[job.tenant][job.number]
        if not self._tenants[job.tenant]:
            del self._tenants[job.tenant]
