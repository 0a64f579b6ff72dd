"""Measure times for calibration and benchmarks: interleaved rounds, two clocks, a tuned allocator,
the machine.

Cases run in turn (A B C, A B C, ...) after one warm-up each, so that other load on the machine
affects all of them alike. Ratios are medians over rounds of times measured side by side.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

import psutil
import torch
from rich.console import Console

from ragfuse.telemetry.progress import progress

log = logging.getLogger("ragfuse.calibration")

MALLOC = MappingProxyType(
    {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
        "MALLOC_TOP_PAD_": "268435456",
    }
)
"""Settings that let glibc keep large buffers. By default it returns each one to the system and
faults it in again page by page. That slows full prefill most, so that without these settings every
speedup looks better than it is.
"""

Clock = Literal["cpu", "wall"]


@dataclass(frozen=True)
class Sample:
    """The times of one run of one case: seconds of CPU time over all threads, and of wall time."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Times:
    """All rounds of one case, and the clock that counts: CPU time on a CPU, wall time on an
    accelerator.
    """

    samples: tuple[Sample, ...]
    clock: Clock

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of each round, by the clock that counts."""
        return self.of(self.clock)

    def of(self, clock: Clock) -> tuple[float, ...]:
        """Return the seconds of each round by the given clock."""
        return tuple(sample.cpu_s if clock == "cpu" else sample.wall_s for sample in self.samples)

    @property
    def median_s(self) -> float:
        """The median of `seconds`."""
        return median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return minimum, median, maximum and all rounds by both clocks, in plain JSON types."""
        return {f"{clock}_s": _spread(self.of(clock)) for clock in _CLOCKS}


_CLOCKS: tuple[Clock, Clock] = ("cpu", "wall")


def _spread(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "min": min(seconds),
        "median": median(seconds),
        "max": max(seconds),
        "rounds": list(seconds),
    }


def speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return how many times faster `fast` is: the median over rounds of slow / fast seconds in the
    same round.
    """
    return median(a / b for a, b in zip(slow, fast, strict=True))


@dataclass(frozen=True)
class Runner:
    """Measures cases in interleaved rounds on one device; `console` shows the progress."""

    rounds: int
    device: torch.device
    console: Console

    def __post_init__(self) -> None:
        """Exempt all loaded objects from garbage collection, once: scanning them takes longer than
        a short run.
        """
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()

    @property
    def clock(self) -> Clock:
        """The clock that counts on this device."""
        return "cpu" if self.device.type == "cpu" else "wall"

    def measure(
        self,
        cases: Mapping[str, Callable[[], object]],
        what: str = "measuring",
        before: Callable[[], object] = lambda: None,
    ) -> dict[str, Times]:
        """Run every case once to warm up, then `rounds` times in turn; return the times by name.

        Args:
            cases: Functions to measure, by name.
            what: Text for the progress bar.
            before: Called before each run, outside the measured time.
        """
        samples: dict[str, list[Sample]] = {name: [] for name in cases}
        with progress(self.console) as bar:
            task = bar.add_task(what, total=(self.rounds + 1) * len(cases))
            for index in range(self.rounds + 1):
                for name, case in cases.items():
                    bar.update(
                        task, description=f"{what}: {name}" + ("" if index else " (warm-up)")
                    )
                    before()
                    sample = self.once(case)
                    if index:
                        samples[name].append(sample)
                    bar.advance(task)
        return {name: Times(tuple(each), self.clock) for name, each in samples.items()}

    def once(self, case: Callable[[], object]) -> Sample:
        """Measure one run, after collecting garbage and waiting for the device to finish earlier
        work.
        """
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


@contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """Set torch's number of threads within this context, and restore it afterwards.

    OMP_NUM_THREADS is set too, so that engines and processes that start here keep the number,
    however busy the machine.
    """
    before, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        os.environ.pop("OMP_NUM_THREADS")
        if variable is not None:
            os.environ["OMP_NUM_THREADS"] = variable


def tune_malloc(console: Console, command: Sequence[str] = ()) -> None:
    """Restart this process with the environment `MALLOC`, if it uses glibc and none of it is set
    yet.

    The process id stays the same (exec), so exit code and Ctrl-C work as before. Call it before
    anything is loaded.

    Args:
        console: Where the restart is announced.
        command: What to run; empty: this process's own command line.
    """
    if not is_glibc() or any(name in os.environ for name in MALLOC):
        return
    console.print(
        "Starting again with an allocator that keeps memory: without, full prefill is measured too"
        " slow."
    )
    log.debug(
        "Starting again with %s", " ".join(f"{name}={value}" for name, value in MALLOC.items())
    )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    arguments = list(command) or [sys.executable, *sys.orig_argv[1:]]
    os.execve(arguments[0], arguments, {**os.environ, **MALLOC})


def is_glibc() -> bool:
    """Return whether this process uses glibc's allocator, as far as can be detected."""
    return (
        sys.platform == "linux"
        and platform.libc_ver()[0] == "glibc"
        and "malloc" not in os.getenv("LD_PRELOAD", "")
    )


def circumstances(device: torch.device, threads: int) -> dict[str, Any]:
    """Return machine, versions, allocator, threads and date, in plain JSON types."""
    return {
        "machine": machine(device),
        "versions": versions(),
        "malloc": malloc_setting(),
        "threads": threads,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return CPU model, cores, memory in bytes, load average, and GPU name ("" on a CPU)."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": psutil.getloadavg()[0],
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, transformers and ragfuse."""
    packages = {"torch": "torch", "transformers": "transformers", "ragfuse": "ragfuse-kv"}
    return {
        "python": platform.python_version(),
        **{name: _version(package) for name, package in packages.items()},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def malloc_setting() -> dict[str, Any]:
    """Return the allocator's settings in the environment, and whether they are those of
    `MALLOC`.
    """
    found = {name: os.environ[name] for name in MALLOC if name in os.environ}
    return {"tuned": is_glibc() and found == dict(MALLOC), "settings": found}
