"""torch computes with no more threads than there are cores for."""

import os
import subprocess
import sys

import pytest

from ragfuse.models import threads


@pytest.mark.parametrize(
    ("quota", "cpus"), [("150000 100000", 1.5), ("max 100000", None), (None, None)]
)
def test_the_quota_of_a_container_holds(tmp_path, quota, cpus):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(f"{quota}\n")
    assert threads.cpu_quota(file) == cpus


def test_hardware_threads_of_one_core_count_once(monkeypatch):
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda logical: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    assert threads.allowed_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert threads.allowed_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1.9)
    assert threads.allowed_threads() == 1


def test_cores_that_were_busy_only_for_a_moment_count_as_free(monkeypatch):
    monkeypatch.setattr(threads, "allowed_threads", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_affinity", lambda: range(8))
    monkeypatch.setattr(threads.psutil, "cpu_percent", lambda *_, **__: [100.0] * 8)
    monkeypatch.setattr(threads.psutil, "getloadavg", lambda: (2.2, 0.0, 0.0))
    assert threads.available_threads() == 6
    monkeypatch.setattr(threads.psutil, "cpu_percent", lambda *_, **__: [5.0] * 8)
    assert threads.available_threads() == 8


@pytest.mark.parametrize(
    ("environment", "setting", "found"),
    [
        ({}, "None", "1"),
        ({"OMP_NUM_THREADS": "2"}, "None", "2"),
        ({"OMP_NUM_THREADS": "2"}, "3", "3"),
    ],
)
def test_torch_gets_the_number_that_is_named_or_what_is_free(environment, setting, found):
    code = f"""if True:
        import torch
        from ragfuse.models import threads
        torch.set_num_threads(2) if {not environment} else None
        threads.available_threads = lambda: 1
        threads.limit_threads({setting})
        print(torch.get_num_threads())
    """
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == found, done.stderr
