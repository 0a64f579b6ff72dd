"""How many threads torch computes with: as many as this process may run at once beside what else
the machine does.
"""

from __future__ import annotations

import logging
import os
from math import floor
from pathlib import Path

import psutil
import torch

from ragfuse.process.shared import shared

WATCH_S = 0.1
"""Seconds for which the load of the machine is watched."""
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Where a container sees the CPU quota of its cgroup (version 2)."""
log = logging.getLogger("ragfuse.models")


def limit_threads(threads: int | None) -> int:
    """Set torch's number of compute threads, and return it.

    The threads of one computation wait for each other after each operation. If they share a core
    with another program, one of them often does not run while the others wait for it, and a prefill
    takes several times as long as with one thread alone. So torch gets no more threads than there
    are free cores.

    Args:
        threads: The number of threads. None: at most `available_threads()` and never more than
            torch has already, decided once in this process; where OMP_NUM_THREADS is set, torch
            stays as it is.
    """
    before = torch.get_num_threads()
    if threads is None:
        if before == 1 or "OMP_NUM_THREADS" in os.environ:
            return before
        threads = min(before, shared(("threads",), available_threads))
    if threads != before:
        torch.set_num_threads(threads)
        many = "thread" if threads == 1 else "threads"
        log.info(
            "torch computes with %d %s, not %d, as other cores are busy. RAGFUSE_THREADS sets"
            " another number.",
            threads,
            many,
            before,
        )
    return threads


def available_threads() -> int:
    """Return how many threads can compute here at once: free cores, within what this process may
    use; at least 1.

    A core counts as busy only if other programs used it both now and, by the load average, in the
    last minute (docs/facts.md, "Threads").
    """
    allowed = allowed_threads()
    if allowed == 1:
        return 1
    used = psutil.cpu_percent(WATCH_S, percpu=True)
    now = sum(1 - used[cpu] / 100 for cpu in _affinity() if cpu < len(used))
    free = max(now, (os.cpu_count() or 1) - psutil.getloadavg()[0])
    return max(1, min(allowed, floor(free + 0.5)))


def allowed_threads() -> int:
    """Return how many threads this process may use: the least of physical cores, CPU affinity and
    the container's quota.
    """
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, len(_affinity()), floor(quota) if quota is not None else cores))


def cpu_quota(file: Path = CPU_MAX) -> float | None:
    """Return the CPUs that a container may use on average; None where they are not limited."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # none there, or "max"
        return None


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
