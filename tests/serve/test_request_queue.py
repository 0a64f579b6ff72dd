"""The queue of requests: order, fairness, its bound, cancelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.errors import BusyError
from ragfuse.serve.request_queue import JobQueue


def queue_of(*submitted: tuple[str, str], most: int = 100) -> JobQueue[str]:
    queue: JobQueue[str] = JobQueue(most)
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
    queue: JobQueue[int] = JobQueue(1000)
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
        assert (len(queue), list(queue.running)) == (len(waiting), running)


def test_what_is_ahead_is_what_is_taken_next():
    queue = queue_of(("a", "1"), ("a", "2"), ("a", "3"), ("b", "4"), ("c", "5"), ("b", "6"))
    ahead = [job.work for job in queue.ahead()]
    assert ahead == taken(queue) == ["1", "4", "5", "2", "6", "3"]


def test_a_full_queue_refuses_and_says_when_to_come_again():
    queue: JobQueue[int] = JobQueue(3, max_each=2)
    queue.submit(1, "a")
    queue.submit(2, "a")
    with pytest.raises(BusyError, match="2 of them yours") as told:
        queue.submit(3, "a")
    assert told.value.wait_s > 0
    queue.submit(3, "b")
    with pytest.raises(BusyError, match="full"):
        queue.submit(4, "b")
    assert len(queue) == 3
    queue.cancel(queue.ahead()[0])
    queue.submit(5, "b")
