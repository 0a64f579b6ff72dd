"""torch computes with no more threads than there are cores for."""

import os
import subprocess
import sys

import pytest

from ragfuse.models import threads


def v2(tmp_path, *quotas):
    """A tree of cgroups of version 2, from the root's child down."""
    folder, path = tmp_path / "cgroup", ""
    folder.mkdir()
    for number, quota in enumerate(quotas):
        path += f"/g{number}"
        (folder / path.lstrip("/")).mkdir()
        (folder / path.lstrip("/") / "cpu.max").write_text(quota + "\n")
    membership = tmp_path / "membership"
    membership.write_text(f"0::{path}\n")
    return folder, membership


@pytest.mark.parametrize(
    ("quotas", "cpus"),
    [
        (("150000 100000",), 1.5),
        (("400000 100000", "max 100000"), 4.0),
        (("100000 100000", "400000 100000"), 1.0),
        ((), None),
    ],
)
def test_the_least_quota_up_to_the_root_holds(tmp_path, quotas, cpus):
    assert threads.cpu_quota(*v2(tmp_path, *quotas)) == cpus


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
