"""The model's lock: one at a time, long and short steps in turns, and the same thread as often as
it likes.
"""

import threading
import time

from ragfuse.hf.lock import FairLock

WAIT_S = 60.0


def until_waiting(lock: FairLock, count: int) -> None:
    end = time.monotonic() + WAIT_S
    while lock.waiting < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_those_who_wait_get_it_in_turn_before_who_lets_go_of_it() -> None:
    lock, order = FairLock(), []

    def take(name: int) -> None:
        with lock:
            order.append(name)

    threads = []
    with lock:
        for name in range(5):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            until_waiting(lock, name + 1)
    with lock:
        order.append(-1)
    for thread in threads:
        thread.join(WAIT_S)
    assert order == [0, 1, 2, 3, 4, -1]


def test_short_steps_that_wait_go_before_the_next_long_one_each_once() -> None:
    lock, order = FairLock(), list[str]()

    def take(name: str, times: int) -> None:
        for _ in range(times):
            with lock.short() if name.islower() else lock:
                order.append(name)

    threads = []
    with lock:
        for name, times in (("A", 1), ("B", 1), ("C", 1), ("a", 3), ("b", 1)):
            threads.append(threading.Thread(target=take, args=(name, times)))
            threads[-1].start()
            until_waiting(lock, len(threads))
    for thread in threads:
        thread.join(WAIT_S)
    assert order[:3] == ["a", "b", "A"]
    assert sorted(order) == sorted("ABCaaab")
    assert [name for name in order if name.isupper()] == ["A", "B", "C"]
    before_b, before_c = "".join(order).split("A")[1].split("C")[0].split("B")
    assert before_b in ("", "a")  # one short step at most, if it was asked for in time
    assert before_c in ("", "a")


def test_one_thread_holds_it_as_often_as_it_likes() -> None:
    lock, taken = FairLock(), threading.Event()

    def take() -> None:
        with lock:
            taken.set()

    thread = threading.Thread(target=take)
    with lock:
        with lock:
            assert lock.is_mine
            thread.start()
            until_waiting(lock, 1)
        assert lock.is_mine
        assert not taken.wait(0.05)
    assert taken.wait(WAIT_S)
    thread.join(WAIT_S)
    assert not lock.is_mine


def test_nobody_is_in_it_with_another() -> None:
    lock, inside, most = FairLock(), [0], [0]

    def work() -> None:
        for turn in range(200):
            with lock if turn % 3 else lock.short():
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert most == [1]
    assert lock.waiting == 0
