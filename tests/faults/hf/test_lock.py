"""The model's lock: one at a time, long and short steps in turns, and the same thread as often as
it likes.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ragfuse.hf.decode import FairLock

WAIT_S = 60.0


def until_waiting(lock: FairLock, count: int) -> None:
    end = time.monotonic() + WAIT_S
    while lock.waiting < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def taken_by(lock: FairLock, takers: Sequence[tuple[str, int]]) -> list[str]:
    """The names of waiting threads in the order in which they get the lock.

    A taker is a name and how often it takes the lock; a name in lower case takes it for short
    steps. The last taker holds the lock while the others begin to wait.
    """
    order, threads = list[str](), list[threading.Thread]()

    def take(name: str, times: int) -> None:
        for _ in range(times):
            with lock.short() if name.islower() else lock:
                order.append(name)

    with lock:
        for taker in takers:
            threads.append(threading.Thread(target=take, args=taker))
            threads[-1].start()
            until_waiting(lock, len(threads))
    take("HOLDER", 1)
    for thread in threads:
        thread.join(WAIT_S)
    return order


def test_waiting_threads_get_the_lock_in_turn_before_its_last_holder():
    assert taken_by(FairLock(), [(name, 1) for name in "ABCDE"]) == [*"ABCDE", "HOLDER"]


def test_each_waiting_short_step_runs_once_before_the_next_long_one():
    takers = [("A", 1), ("B", 1), ("C", 1), ("a", 3), ("b", 1)]
    order = [name for name in taken_by(FairLock(), takers) if name != "HOLDER"]
    assert order[:3] == ["a", "b", "A"]
    assert sorted(order) == sorted("ABCaaab")
    assert [name for name in order if name.isupper()] == ["A", "B", "C"]
    before_b, before_c = "".join(order).split("A")[1].split("C")[0].split("B")
    assert before_b in ("", "a")  # one short step at most, if it was asked for in time
    assert before_c in ("", "a")


def test_two_threads_never_hold_the_lock_at_once():
    lock, inside, most = FairLock(), [0], [0]

    def work(_: int) -> None:
        for turn in range(200):
            with lock if turn % 3 else lock.short():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert most == [1]
    assert lock.waiting == 0
