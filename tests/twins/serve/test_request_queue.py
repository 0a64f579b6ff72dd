"""The queue of requests: order, fairness, its bound, cancelling."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragfuse.serve.refusals import APIError
from ragfuse.serve.request_queue import Job, RequestQueue

TALKS = st.sampled_from([None, "one", "two"])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "join", "leave", "cancel"]), st.integers(0, 3), TALKS
    ),
    max_size=60,
)


@given(STEPS)
def test_no_turn_runs_beside_another_of_its_conversation_and_none_overtakes_it(steps):
    async def play():
        queue, turns = RequestQueue(2, 1000), list[str]()
        waiting, running = list[Job](), list[Job]()

        def last_turn(job):
            return len(turns) - turns[::-1].index(job.tenant) if job.tenant in turns else 0

        for step, who, conversation in steps:
            if step == "join":
                waiting.append(queue.join("abc"[who % 3], conversation))
            elif all_jobs := [*waiting, *running]:
                job = all_jobs[who % len(all_jobs)]
                (waiting if job in waiting else running).remove(job)
                if step == "cancel":
                    job.turn.cancel()
                queue.leave(job)
            while len(running) < 2:
                busy = [(job.tenant, job.conversation) for job in running if job.conversation]
                free = [job for job in waiting if (job.tenant, job.conversation) not in busy]
                if not free:
                    break
                job = min(free, key=last_turn)  # the first of the tenant served longest ago
                waiting.remove(job)
                running.append(job)
                turns.append(job.tenant)
            assert (len(queue), list(queue.running)) == (len(waiting), running)
            assert all(job.turn.done() for job in running)

    asyncio.run(play())


async def test_tenants_take_turns_and_what_is_ahead_is_what_runs_next():
    queue = RequestQueue(1, 100)
    names = ["a1", "a2", "a3", "b4", "c5", "b6"]
    jobs = {queue.join(name[0]): name for name in names}
    ahead = [jobs[job] for job in (*queue.running, *queue.ahead())]
    ran = list[str]()
    while queue.running:
        (job,) = queue.running
        ran.append(jobs[job])
        queue.leave(job)
    assert ahead == ran == ["a1", "b4", "c5", "a2", "b6", "a3"]


async def test_a_full_queue_refuses_and_says_when_to_come_again():
    queue = RequestQueue(1, 3, max_each=2)
    for _ in range(3):  # one runs
        queue.join("a")
    with pytest.raises(APIError, match="2 of them yours") as told:
        queue.join("a")
    assert told.value.status == 429
    assert told.value.retry_s > 0
    queue.join("b")
    with pytest.raises(APIError, match="Too many requests"):
        queue.join("b")
    queue.leave(queue.ahead()[0])
    queue.join("b")
    assert len(queue) == 3


async def test_a_request_cancelled_as_its_turn_comes_passes_the_turn_on():
    queue = RequestQueue(1, 10)
    first, second, third = (queue.join(tenant) for tenant in ("a", "a", "b"))
    await first.turn
    second.turn.cancel()
    queue.leave(first)
    queue.leave(second)
    await third.turn
    queue.leave(third)
    assert not queue.running
