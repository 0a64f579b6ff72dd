"""The device, dtype and number of threads that "auto" means on this machine."""

from __future__ import annotations

import logging
import os
from math import floor
from pathlib import Path
from typing import Literal

import psutil
import torch

from ragfuse.errors import ModelError
from ragfuse.process.shared import shared
from ragfuse.settings import Settings

_BF16_UNITS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16")


def auto_dtype(device: str) -> str:
    """Return the dtype that `dtype="auto"` means on a device.

    The dtype is bfloat16 if the device supports bfloat16 natively. A CPU without bfloat16 units
    gets float32, which is two to three times faster there, although KV takes twice the bytes. GPUs
    too old for bfloat16 get float16.

    Args:
        device: Name of the device, such as "cpu" or "cuda:1".
    """
    kind = torch.device(device).type
    if kind == "mps":
        return "bfloat16" if torch.backends.mps.is_macos_or_newer(14, 0) else "float16"
    if kind != "cpu":
        able = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        return "bfloat16" if able else "float16"
    found = torch.cpu.get_capabilities()
    return "bfloat16" if any(found.get(unit) for unit in _BF16_UNITS) else "float32"


def auto_device() -> str:
    """Return the device that `device="auto"` means: a GPU if torch sees one, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def resolve_auto(settings: Settings) -> Settings:
    """Return settings with resolved device and dtype, and absolute folders.

    Settings with the same meaning become equal, whether or not values were given as "auto".

    Raises:
        ModelError: torch does not know the device, or the dtype is not supported.
    """
    settings = settings.placed()
    device = auto_device() if settings.device == "auto" else settings.device
    dtype: str = settings.dtype
    given = settings.model_kwargs.get("torch_dtype", settings.model_kwargs.get("dtype"))
    if given not in (None, "auto"):
        dtype = dtype_named(given)
    elif dtype == "auto":
        require_device(device)
        dtype = auto_dtype(device)
    if (device, dtype) == (settings.device, settings.dtype):
        return settings
    return settings.model_copy(update={"device": device, "dtype": dtype})


def dtype_named(given: object) -> Literal["float32", "bfloat16", "float16"]:
    """Return the name of a dtype that is given as a name or as a torch dtype.

    Raise ModelError if KV cannot have the dtype.
    """
    name = str(given).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelError(f"The dtype must be float32, bfloat16 or float16, found '{name}'.")
    return name  # type: ignore[return-value]


def require_device(name: str) -> None:
    """Raise ModelError if torch does not know the device or cannot use the device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"torch cannot use device '{name}' ({reason}). Choose another, such as --device cpu."
        ) from error


WATCH_S = 0.1
"""Seconds during which the machine's load is measured."""
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The CPU quota of a container's cgroup (version 2)."""
log = logging.getLogger("ragfuse.models")


def limit_threads(threads: int | None) -> int:
    """Set torch's number of compute threads, and return the number.

    After each operation, all threads of a computation wait for the slowest thread. If one thread
    shares a core with another program, a prefill takes several times as long as on a single thread.
    So torch uses only free cores, unless `threads` or OMP_NUM_THREADS sets the number of threads.

    Args:
        threads: The number of threads. None means torch's own number, but at most the number of
            cores that were free at the first call in this process (`available_threads`). If
            OMP_NUM_THREADS is set, None means torch's own number.
    """
    before = torch.get_num_threads()
    if threads is None:
        if before == 1 or "OMP_NUM_THREADS" in os.environ:
            return before
        threads = min(before, shared(("threads",), available_threads))
        if threads < before:
            log.info(
                "torch computes with %d %s, not %d, because cores are busy (see RAGFUSE_THREADS).",
                threads,
                "thread" if threads == 1 else "threads",
                before,
            )
    if threads != before:
        torch.set_num_threads(threads)
    return threads


def available_threads() -> int:
    """Return the number of free cores within this process's limits, at least 1.

    A core counts as busy only if other programs use the core now and, by the load average, also
    used the core in the last minute (docs/facts.md, "Threads").
    """
    allowed = allowed_threads()
    if allowed == 1:
        return 1
    used = psutil.cpu_percent(WATCH_S, percpu=True)
    now = sum(1 - used[cpu] / 100 for cpu in _affinity() if cpu < len(used))
    free = max(now, (os.cpu_count() or 1) - psutil.getloadavg()[0])
    return max(1, min(allowed, floor(free + 0.5)))


def allowed_threads() -> int:
    """Return the smallest of: physical cores, CPU affinity, and the container's CPU quota."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, len(_affinity()), floor(quota) if quota is not None else cores))


def cpu_quota() -> float | None:
    """Return the number of CPUs that a container may use on average; None means no limit."""
    try:
        quota, period = CPU_MAX.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
