"""Pools of compute threads of torch's libgomp: released by the thread that leaves computing to
another.
"""

import threading

import pytest
import torch

from ragfuse.process import jobs
from tests.kits.tiny import python

pytestmark = pytest.mark.skipif(jobs._libgomp() is None, reason="torch uses no libgomp here")


def test_a_released_pool_leaves_no_thread_and_starts_again():
    counts = python("""
        import json, os, time, torch
        from ragfuse.process.jobs import release_pool
        numbers = torch.ones(1_000_000)

        def threads():
            numbers.add_(1)
            return len(os.listdir("/proc/self/task"))

        torch.set_num_threads(3)
        before, computed = len(os.listdir("/proc/self/task")), threads()
        release_pool()
        until = time.monotonic() + 60
        while len(os.listdir("/proc/self/task")) > before and time.monotonic() < until:
            time.sleep(0.01)
        print(json.dumps([computed - before, len(os.listdir("/proc/self/task")) - before, threads() - before]))
        """)
    assert counts == [2, 0, 2]


def test_threads_are_set_for_the_own_thread_alone():
    found = list[int]()

    def set_own():
        jobs.use_threads(1)
        found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    thread = threading.Thread(target=set_own)
    thread.start()
    thread.join()
    assert (found, torch.get_num_threads()) == ([1], before)


def test_without_torch_nothing_is_loaded():
    code = """
        import json, sys
        from ragfuse.process.jobs import release_pool
        release_pool()
        print(json.dumps("torch" in sys.modules))
        """
    assert python(code) is False
