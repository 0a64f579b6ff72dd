"""The queue of requests: order, fairness, its bound, cancelling, and threads that all use it at
once.
"""

from collections import Counter
from threading import Barrier, Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.errors import BusyError
from ragfuse.serve.request_queue import JobQueue


class Clock:
    """Seconds, when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of(*submitted: tuple[str, str], most: int = 100) -> JobQueue[str]:
    queue: JobQueue[str] = JobQueue(most, Clock())
    for tenant, what in submitted:
        queue.submit(what, tenant, conversation=what)
    return queue


def taken(queue: JobQueue[str]) -> list[str]:
    found = []
    while (job := queue.take()) is not None:
        found.append(job.work)
    return found


TALKS = st.sampled_from([None, "one", "two"])
TURNS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "take", "cancel", "done"]), st.integers(0, 3), TALKS
    ),
    max_size=60,
)


@given(TURNS)
def test_no_turn_runs_beside_another_of_its_conversation_and_none_overtakes_it(steps):
    queue: JobQueue[int] = JobQueue(1000, Clock())
    waiting, running, ring = [], [], []
    for number, (step, who, conversation) in enumerate(steps):
        tenant = "abc"[who % 3]
        if step == "submit":
            waiting.append(queue.submit(number, tenant, conversation))
            ring = ring if tenant in ring else [*ring, tenant]
        elif step == "take":
            busy = {
                (job.tenant, job.conversation) for job in running if job.conversation is not None
            }
            free = [job for job in waiting if (job.tenant, job.conversation) not in busy]
            expected = next((job for name in ring for job in free if job.tenant == name), None)
            job = queue.take()
            assert job == expected
            if job is not None:
                waiting.remove(job)
                running.append(job)
                ring = [*(name for name in ring if name != job.tenant), job.tenant]
        elif step == "done" and running:
            queue.done(running.pop(who % len(running)))
        elif step == "cancel" and waiting:
            job = waiting.pop(who % len(waiting))
            assert queue.cancel(job)
            assert not queue.cancel(job)
        ring = [name for name in ring if any(job.tenant == name for job in waiting)]
        assert len(queue) == len(waiting)


def test_what_is_ahead_is_what_is_taken_next():
    queue = queue_of(("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"), ("b", "6"))
    ahead = [job.work for job in queue.ahead()]
    assert ahead == taken(queue) == ["1", "4", "5", "2", "6", "3"]


def test_a_full_queue_refuses_and_says_when_to_come_again():
    clock = Clock()
    queue: JobQueue[int] = JobQueue(2, clock)
    queue.submit(1)
    queue.submit(2)
    with pytest.raises(BusyError) as unmeasured:
        queue.submit(3)
    assert unmeasured.value.wait_s > 0
    for _ in range(3):
        job = queue.take()
        clock.now += 30
        queue.done(job)
        queue.submit(9)
    with pytest.raises(BusyError) as measured:
        queue.submit(4)
    assert measured.value.wait_s == pytest.approx(60)  # two wait, and one is done every 30 s
    assert len(queue) == 2
    queue.cancel(queue.ahead()[0])
    queue.submit(5)


def test_a_tenant_whose_room_is_full_waits_as_long_as_its_turns_among_the_others_take():
    clock = Clock()
    queue: JobQueue[int] = JobQueue(100, clock, max_each=4)
    queue.submit(0)
    job = queue.take()
    clock.now += 5
    queue.done(job)
    for number in range(4):
        queue.submit(number, "a")
    queue.submit(0, "b")
    with pytest.raises(BusyError) as told:
        queue.submit(9, "a")
    assert told.value.wait_s == pytest.approx(4 * 2 * 5)


def test_a_pause_is_no_pace():
    clock = Clock()
    queue: JobQueue[int] = JobQueue(1, clock)
    for _ in range(40):
        clock.now += 1000
        queue.submit(0)
        job = queue.take()
        clock.now += 2
        queue.done(job)
        queue.done(job)
    queue.submit(0)
    with pytest.raises(BusyError) as told:
        queue.submit(0)
    assert told.value.wait_s == pytest.approx(2)


def test_a_job_that_runs_is_counted_until_it_is_done_and_cannot_be_cancelled():
    queue = queue_of(("a", "1"))
    job = queue.take()
    assert (list(queue.running), len(queue), queue.cancel(job)) == ([job], 0, False)
    queue.done(job)
    assert not queue.running


def test_every_job_of_many_threads_is_taken_or_cancelled_once():
    queue: JobQueue[tuple[int, int]] = JobQueue(10_000, Clock())
    start, all_sent, found, cancelled = (
        Barrier(8),
        Event(),
        [[] for _ in range(4)],
        [[] for _ in range(4)],
    )

    def send(who: int) -> None:
        start.wait()
        for number in range(500):
            job = queue.submit((who, number), tenant=str(who))
            if number % 5 == 0 and queue.cancel(job):
                cancelled[who].append(job.work)
            queue.ahead()

    def run(who: int) -> None:
        start.wait()
        while not all_sent.is_set() or len(queue):
            if (job := queue.take()) is not None:
                found[who].append(job.work)
                queue.done(job)

    senders = [Thread(target=send, args=(who,)) for who in range(4)]
    runners = [Thread(target=run, args=(who,)) for who in range(4)]
    for thread in (*senders, *runners):
        thread.start()
    for thread in senders:
        thread.join(60)
    all_sent.set()
    for thread in runners:
        thread.join(60)
    seen = Counter(what for each in (*found, *cancelled) for what in each)
    assert seen == Counter((who, number) for who in range(4) for number in range(500))
    assert len(queue.running) == 0 == len(queue)
    for each in found:  # a runner sees each tenant's jobs in the order in which they came
        for who in range(4):
            mine = [number for tenant, number in each if tenant == who]
            assert mine == sorted(mine)
