"""torch computes with no more threads than there are cores for."""

import os
import subprocess
import sys

import pytest

from ragfuse.models import device


@pytest.mark.parametrize(
    ("quota", "cpus"), [("150000 100000", 1.5), ("max 100000", None), (None, None)]
)
def test_the_quota_of_a_container_holds(tmp_path, monkeypatch, quota, cpus):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(f"{quota}\n")
    monkeypatch.setattr(device, "CPU_MAX", file)
    assert device.cpu_quota() == cpus


def test_hardware_threads_of_one_core_count_once(monkeypatch):
    monkeypatch.setattr(device.psutil, "cpu_count", lambda logical: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(device, "cpu_quota", lambda: None)
    assert device.allowed_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    assert device.allowed_threads() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(device, "cpu_quota", lambda: 1.9)
    assert device.allowed_threads() == 1


def test_cores_that_were_busy_only_for_a_moment_count_as_free(monkeypatch):
    monkeypatch.setattr(device, "allowed_threads", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(device, "_affinity", lambda: range(8))
    monkeypatch.setattr(device.psutil, "cpu_percent", lambda *_, **__: [100.0] * 8)
    monkeypatch.setattr(device.psutil, "getloadavg", lambda: (2.2, 0.0, 0.0))
    assert device.available_threads() == 6
    monkeypatch.setattr(device.psutil, "cpu_percent", lambda *_, **__: [5.0] * 8)
    assert device.available_threads() == 8


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
        import logging, torch
        from ragfuse.models import device
        logging.basicConfig(level="INFO")
        torch.set_num_threads(2) if {not environment} else None
        device.available_threads = lambda: 1
        device.limit_threads({setting})
        print(torch.get_num_threads())
    """
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == found, done.stderr
    # a number that the user chose is not explained by busy cores
    assert ("RAGFUSE_THREADS" in done.stderr) == (not environment)
