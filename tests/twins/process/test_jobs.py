"""The queue of background jobs: in order, each once, no more than fits, and a thread only while
something waits.
"""

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from ragfuse.process.jobs import BackgroundJobs


class Gate:
    """A job that holds the queue until it is opened, and a list of what ran."""

    def __init__(self) -> None:
        self.begun, self.open, self.ran = threading.Event(), threading.Event(), list[int]()

    def hold(self, queue: BackgroundJobs, **how: object) -> None:
        queue.submit(lambda: (self.begun.set(), self.open.wait(60)), **how)  # type: ignore[arg-type]
        assert self.begun.wait(60)

    def job(self, number: int) -> partial[None]:
        return partial(self.ran.append, number)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "ragfuse-test" and thread.is_alive()
    ]


def test_many_threads_submit_while_it_is_closed_and_nobody_hangs():
    for _ in range(50):
        queue, gate, done = BackgroundJobs("test", limit=1000), threading.Barrier(5), list[int]()
        taken = list[bool]()

        def submit(
            queue: BackgroundJobs = queue,
            gate: threading.Barrier = gate,
            done: list[int] = done,
            taken: list[bool] = taken,
        ) -> None:
            gate.wait()
            for number in range(20):
                taken.append(queue.submit(partial(done.append, number)) is not None)

        busy = [threading.Thread(target=submit) for _ in range(4)]
        for thread in busy:
            thread.start()
        gate.wait()
        assert queue.close()
        for thread in busy:
            thread.join(60)
            assert not thread.is_alive()
        assert (len(taken), len(done)) == (80, sum(taken))
        assert queue.flush(60)
    assert threads() == []


def test_a_full_queue_drops_without_waiting_but_not_what_somebody_waits_for(
    gate,
):
    queue = BackgroundJobs("test", limit=2)
    gate.hold(queue)
    queued = [queue.submit(gate.job(number)) for number in range(4)]
    assert [each is not None for each in queued] == [True, True, False, False]
    assert queue.submit(gate.job(9), is_awaited=True)
    assert len(queue) == 4
    gate.open.set()
    assert queue.close()
    assert gate.ran == [0, 1, 9]


def test_what_holds_too_many_bytes_is_dropped_unless_it_is_alone(gate):
    queue = BackgroundJobs("test", max_nbytes=10)
    gate.hold(queue, nbytes=30)
    assert not queue.submit(gate.job(0), nbytes=1)
    assert queue.submit(gate.job(1), is_awaited=True)
    gate.open.set()
    assert queue.flush()
    assert queue.submit(gate.job(2), nbytes=11)
    queue.close()
    assert gate.ran == [1, 2]


def test_a_job_that_fails_is_told_and_the_next_one_runs(
    caplog,
):
    queue, ran = BackgroundJobs("test"), list[int]()
    queue.submit(lambda: 1 / 0)
    queue.submit(lambda: ran.append(1))
    assert queue.flush()
    assert ran == [1]
    assert "ZeroDivisionError" in caplog.text


def test_jobs_are_waited_for_and_cancelled_by_their_names(gate):
    queue = BackgroundJobs("test")
    gate.hold(queue, names=["at hand"])
    for number in range(3):
        queue.submit(gate.job(number), [number, "waits"])
    assert queue.names == {"at hand", "waits", 0, 1, 2}
    queue.wait(["nobody's"], 60)
    cancelling = threading.Thread(target=queue.cancel, args=(lambda name: name in (0, 2),))
    cancelling.start()
    while queue.names != {"at hand", "waits", 1}:
        cancelling.join(0.01)
    assert cancelling.is_alive()  # until the job at hand ends
    waiting = threading.Thread(target=queue.wait, args=(["waits"], 60))
    waiting.start()
    gate.open.set()
    for thread in (cancelling, waiting):
        thread.join(60)
        assert not thread.is_alive()
    assert gate.ran == [1]
    assert queue.flush(60)


def test_jobs_run_in_order_and_closing_finishes_what_waits():
    queue, ran = BackgroundJobs("test"), list[int]()
    assert all(queue.submit(partial(ran.append, number)) for number in range(10))
    assert queue.close()
    assert not queue.submit(partial(ran.append, 99))
    assert queue.close()
    assert ran == list(range(10))
    assert threads() == []


@pytest.mark.parametrize("finishes", [True, False])
def test_closing_with_a_bound_drops_what_waits(gate, finishes):
    queue = BackgroundJobs("test", finishes=finishes)
    gate.hold(queue)
    waiting = queue.submit(gate.job(1))
    assert not queue.flush(0.01)
    closing = threading.Thread(target=queue.close, args=(0.01,))
    closing.start()
    assert waiting.result(60) is None
    if finishes:
        assert closing.is_alive()
    else:
        closing.join(60)
        assert not closing.is_alive()
    gate.open.set()
    closing.join(60)
    assert queue.flush(60)
    assert gate.ran == []


def test_an_idle_queue_holds_nobody():
    class Owner:
        def __init__(self) -> None:
            self.queue = BackgroundJobs("test")

        def work(self) -> None: ...

    owner = Owner()
    owner.queue.submit(owner.work)
    owner.queue.flush()
    gone = weakref.ref(owner)
    for thread in threads():
        thread.join(60)
    del owner
    gc.collect()
    assert gone() is None


def test_where_no_thread_can_be_started_it_says_so_and_the_next_job_starts_one(
    monkeypatch,
):
    queue, done = BackgroundJobs("test"), list[int]()

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert not queue.submit(partial(done.append, 1))
    assert queue.submit(partial(done.append, 2))
    assert queue.flush(60)
    assert done == [2]


def test_an_owner_is_closed_when_the_interpreter_ends():
    program = """
from ragfuse.process.jobs import close_at_exit
class Owner:
    def close(self, timeout_s=None):
        print("closed", timeout_s)
owner, other = Owner(), Owner()
close_at_exit(owner)
close_at_exit(other)
del other
print("last line")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:-1] == ["last line", "closed 5.0"]
