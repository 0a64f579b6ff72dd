"""The thread in the background: it lives while something waits, and every job is done once."""

import gc
import subprocess
import sys
import threading
import weakref
from collections import deque

from ragfuse.process.worker import Worker, close_at_exit


class Queue:
    """The least that an owner is: a queue in order."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.worker = Worker("test", self._take, self._run)
        self.jobs: deque[object] = deque()

    def submit(self, job: object) -> bool:
        with self.worker.changed:
            self.jobs.append(job)
            return self.worker.start()

    def _take(self) -> object | None:
        return self.jobs.popleft() if self.jobs else None

    def _run(self, job: object) -> None:
        self.done.append(job() if callable(job) else job)


def test_many_threads_submit_and_every_job_is_done_once():
    queue = Queue()

    def many(first: int) -> None:
        for number in range(first, first + 500):
            queue.submit(number + 1)

    threads = [threading.Thread(target=many, args=(first,)) for first in range(0, 4000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.worker.flush(60)
    assert sorted(queue.done) == list(range(1, 4001))
    assert not queue.worker.is_running


def test_flush_waits_for_the_job_at_hand_and_says_where_it_took_too_long():
    queue, go = Queue(), threading.Event()
    queue.submit(lambda: go.wait(60))
    assert not queue.worker.flush(0.05)
    go.set()
    assert queue.worker.flush(60)
    assert queue.done == [True]


def test_where_no_thread_can_be_started_it_says_so_and_the_next_job_starts_one(monkeypatch):
    queue = Queue()

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        assert not queue.submit(1)
    assert queue.submit(2)
    assert queue.worker.flush(60)
    assert queue.done == [1, 2]


def test_who_is_to_be_closed_at_exit_is_not_kept_for_it():
    class Owner:
        def close(self, timeout_s: float | None = None) -> None:
            raise AssertionError("it is gone")

    owner = Owner()
    close_at_exit(owner)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_an_owner_is_closed_when_the_interpreter_ends():
    program = """
from ragfuse.process.worker import close_at_exit
class Owner:
    def close(self, timeout_s=None):
        print("closed", timeout_s)
owner = Owner()
close_at_exit(owner, 1.5)
print("last line")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["last line", "closed 1.5"]
