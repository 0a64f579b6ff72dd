"""Tune the allocator, measure CPU time and wall time of a prefill, and describe the machine."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import psutil
import torch
from rich.console import Console

MALLOC = MappingProxyType(
    {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
        "MALLOC_TOP_PAD_": "268435456",
    }
)
"""glibc settings by which freed memory stays in the process. By default, glibc returns each large
buffer to the system, and the next buffer is faulted in page by page. The page faults slow full
prefill more than fused prefill, so measured speedups would be too high.
"""

Clock = Literal["cpu", "wall"]


@dataclass(frozen=True)
class Sample:
    """The times of one call: seconds of CPU time over all threads, and of wall time."""

    cpu_s: float
    wall_s: float


class Stopwatch:
    """Times calls on a device. Garbage collection skips objects older than the first stopwatch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()

    @property
    def clock(self) -> Clock:
        """The clock to compare by: CPU time on a CPU, wall time on an accelerator."""
        return "cpu" if self.device.type == "cpu" else "wall"

    def once(self, case: Callable[[], object]) -> Sample:
        """Time one call of `case`, after collecting garbage and synchronising the device."""
        gc.collect()
        self._synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        result = case()
        self._synchronize()
        sample = Sample(time.process_time() - cpu, time.perf_counter() - wall)
        del result
        return sample

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def tune_malloc(console: Console) -> None:
    """Restart this process with the environment variables `MALLOC`.

    Nothing happens without glibc's allocator, or if one of the variables is already set. The
    process id stays the same (exec), so exit code and Ctrl-C work as before. Call this function
    before models are loaded.

    Args:
        console: Console for the message about the restart.
    """
    if not is_glibc() or any(name in os.environ for name in MALLOC):
        return
    console.print(
        "Restarting with an allocator that keeps freed memory; otherwise full prefill is slower."
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, **MALLOC})


def is_glibc() -> bool:
    """Return whether this process uses glibc's allocator, as far as that is detectable."""
    return (
        sys.platform == "linux"
        and platform.libc_ver()[0] == "glibc"
        and "malloc" not in os.getenv("LD_PRELOAD", "")
    )


def circumstances(device: torch.device, threads: int) -> dict[str, Any]:
    """Return machine, versions, allocator, threads and date as JSON types."""
    return {
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpu": _cpu_name(),
            "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": psutil.getloadavg()[0],
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        },
        "versions": versions(),
        "malloc": malloc_setting(),
        "threads": threads,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, transformers and ragfuse."""
    packages = {"torch": "torch", "transformers": "transformers", "ragfuse": "ragfuse-kv"}
    return {
        "python": platform.python_version(),
        **{name: version(package) for name, package in packages.items()},
    }


def malloc_setting() -> dict[str, Any]:
    """Return the allocator's environment variables, and whether the allocator uses `MALLOC`."""
    found = {name: os.environ[name] for name in MALLOC if name in os.environ}
    return {"tuned": is_glibc() and found == dict(MALLOC), "settings": found}
