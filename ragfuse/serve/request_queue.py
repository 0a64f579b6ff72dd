"""A bounded queue of requests that is fair among tenants and can be inspected.

It only holds values: it runs nothing, and gets its clock as an argument. Any number of threads may take jobs; each
reports when its job is done. Look-ahead prefetching and eviction use the order of the waiting jobs
(`ragfuse.plan.look_ahead`, AttentionStore section 3.3).

The next job is the first one of the tenant that was served longest ago, so that a new tenant's first job waits for at
most one job of each other tenant, however many one of them has sent. A tenant's own jobs run in order of arrival, but a
job waits while another one of its conversation runs, because each turn continues from the history with the turn before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from threading import Condition
from typing import Generic, TypeVar

from ragfuse.errors import BusyError

T = TypeVar("T")
_PACE_WEIGHT = 0.2
"""Weight of the latest job in the moving average of the seconds between two finished jobs."""
_UNKNOWN_PACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Job(Generic[T]):
    """A request that waits or runs.

    Args:
        number: Its number, in order of arrival.
        work: The work.
        tenant: Whose it is.
        conversation: The name of its conversation; None for none.
        arrived_s: When it came, on the queue's clock.
    """

    number: int
    work: T
    tenant: str
    conversation: Hashable | None
    arrived_s: float


class JobQueue(Generic[T]):
    """A queue of jobs by tenant. Thread-safe; only `take` blocks.

    Args:
        max_waiting: Most jobs that wait at once.
        clock: A monotonic clock, in seconds.
        max_each: Most waiting jobs of one tenant; None: `max_waiting`.
        notify: Called after a job was added or the queue was closed, in the thread that did it. An asyncio server
            passes `lambda: loop.call_soon_threadsafe(event.set)` and takes jobs with `take(0)`.
    """

    def __init__(
        self,
        max_waiting: int,
        clock: Callable[[], float],
        max_each: int | None = None,
        notify: Callable[[], object] | None = None,
    ) -> None:
        if max_waiting < 1 or (max_each is not None and max_each < 1):
            raise ValueError(f"max_waiting and max_each must be at least 1, found {max_waiting} and {max_each}.")
        self._max_waiting, self._max_each = max_waiting, max_waiting if max_each is None else max_each
        self._clock, self._on_change = clock, notify
        self._changed = Condition()
        self._tenants: OrderedDict[str, OrderedDict[int, Job[T]]] = OrderedDict()  # the tenant served next comes first
        self._running: dict[int, Job[T]] = {}
        self._running_conversations: set[tuple[str, Hashable]] = set()  # of (tenant, conversation)
        self._waiting = self._number = 0
        self._pace_s: float | None = None
        self._done_s: float | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return how many jobs wait."""
        with self._changed:
            return self._waiting

    @property
    def running(self) -> int:
        """How many jobs were taken and are not done."""
        with self._changed:
            return len(self._running)

    def submit(self, work: T, tenant: str = "", conversation: Hashable | None = None) -> Job[T]:
        """Add a job; raise BusyError, with the seconds to wait, where the queue is full or closed."""
        with self._changed:
            self._check_room(tenant)
            self._number += 1
            job = Job(self._number, work, tenant, conversation, self._clock())
            self._tenants.setdefault(tenant, OrderedDict())[job.number] = job
            self._waiting += 1
            self._changed.notify()
        self._call_on_change()
        return job

    def take(self, timeout_s: float | None = None) -> Job[T] | None:
        """Return the next job, which counts as running from now on; None where there is none, or the queue is closed.

        It waits up to `timeout_s` seconds (None: without limit). No job is taken while another of its conversation
        runs.
        """
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(lambda: self._next() or self._closed, timeout_s)
            job = self._next()
            if job is None:
                return None
            del self._tenants[job.tenant][job.number]
            self._tenants.move_to_end(job.tenant)
            self._drop_from_count(job.tenant)
            if not self._running:
                self._done_s = self._clock()  # idle time does not count towards the pace
            self._running[job.number] = job
            if job.conversation is not None:
                self._running_conversations.add((job.tenant, job.conversation))
            return job

    def done(self, job: Job[T]) -> None:
        """Note that a taken job has ended, successfully or not; further calls do nothing."""
        with self._changed:
            if self._running.pop(job.number, None) is None:
                return
            self._running_conversations.discard((job.tenant, job.conversation))
            self._changed.notify_all()
            now_s = self._clock()
            took_s = max(0.0, now_s - (now_s if self._done_s is None else self._done_s))
            before_s = took_s if self._pace_s is None else self._pace_s
            self._pace_s, self._done_s = before_s + _PACE_WEIGHT * (took_s - before_s), now_s

    def cancel(self, job: Job[T]) -> bool:
        """Remove a waiting job; return False where it does not wait any more. A running job is not stopped."""
        with self._changed:
            jobs = self._tenants.get(job.tenant)
            if jobs is None or jobs.pop(job.number, None) is None:
                return False
            self._drop_from_count(job.tenant)
            return True

    def peek(self) -> Job[T] | None:
        """Return the job that would be taken next; None where no job can be taken now."""
        with self._changed:
            return self._next()

    def ahead(self, window: int | None = None) -> tuple[Job[T], ...]:
        """Return the next `window` jobs (None: all) in the order in which they would be taken.

        That order assumes that no further job comes, and that no job has to wait for another of its conversation.
        """
        with self._changed:
            return tuple(islice(self._in_order(), window))

    def conversations(self, window: int | None = None) -> tuple[Hashable | None, ...]:
        """Return the conversations of the same jobs (None for none), the input of `ragfuse.plan.look_ahead`."""
        with self._changed:
            return tuple(job.conversation for job in islice(self._in_order(), window))

    def wait_s(self) -> float:
        """Return the estimated seconds until all waiting jobs are done, at the recent pace; 0 while there is room."""
        with self._changed:
            return self._done_in_s(self._waiting) if self._waiting >= self._max_waiting else 0.0

    def close(self) -> tuple[Job[T], ...]:
        """Close the queue: return the waiting jobs and remove them; calls that block in `take` return None."""
        with self._changed:
            self._closed = True
            waiting = tuple(self._in_order())
            self._tenants.clear()
            self._waiting = 0
            self._changed.notify_all()
        self._call_on_change()
        return waiting

    # private methods; all but `_call_on_change` are called with the lock held

    def _check_room(self, tenant: str) -> None:
        if self._closed:
            raise BusyError("The queue is closed, because its program is ending. Retry later.", self._done_in_s(1))
        n_waiting = len(self._tenants.get(tenant, ()))
        is_full = self._waiting >= self._max_waiting
        if not is_full and n_waiting < self._max_each:
            return
        wait_s = self._done_in_s(self._waiting if is_full else n_waiting * len(self._tenants))
        found = f"{self._waiting} requests wait already" if is_full else f"{n_waiting} of your requests wait already"
        limit = self._max_waiting if is_full else self._max_each
        raise BusyError(f"The queue is full: {found}, of at most {limit}. Retry in {wait_s:.0f} s.", wait_s)

    def _done_in_s(self, n: int) -> float:
        """Return the estimated seconds for `n` jobs, at least one second, so that clients do not retry all at once."""
        return max(n * (_UNKNOWN_PACE_S if self._pace_s is None else self._pace_s), 1.0)

    def _next(self) -> Job[T] | None:
        """Return the next job that may run, by tenant served longest ago; a conversation runs one job at a time."""
        for jobs in self._tenants.values():
            for job in jobs.values():
                if (job.tenant, job.conversation) not in self._running_conversations:
                    return job
        return None

    def _drop_from_count(self, tenant: str) -> None:
        self._waiting -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def _in_order(self) -> Iterator[Job[T]]:
        if len(self._tenants) == 1:
            yield from next(iter(self._tenants.values())).values()
            return
        iterators = [iter(jobs.values()) for jobs in self._tenants.values()]
        while iterators:
            unfinished = []
            for jobs in iterators:
                job = next(jobs, None)
                if job is not None:
                    yield job
                    unfinished.append(jobs)
            iterators = unfinished

    def _call_on_change(self) -> None:
        if self._on_change is not None:
            self._on_change()
