"""Interleaved rounds: cases run in turn (A B C, A B C, ...) after one warm-up each, so that other
load on the machine affects all of them alike. Ratios are medians over times of the same round.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console

from ragfuse.calibration.runner import Clock, Sample, Stopwatch
from ragfuse.telemetry.progress import progress


@dataclass(frozen=True)
class Times:
    """All rounds of one case, and the clock that counts."""

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
        return {"cpu_s": _spread(self.of("cpu")), "wall_s": _spread(self.of("wall"))}


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


class Runner(Stopwatch):
    """Measures cases in `rounds` interleaved rounds on one device; `console` shows the progress."""

    def __init__(self, rounds: int, device: torch.device, console: Console) -> None:
        super().__init__(device)
        self.rounds = rounds
        self.console = console

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
                    bar.update(task, description=f"{what}: {name}")
                    before()
                    sample = self.once(case)
                    if index:
                        samples[name].append(sample)
                    bar.advance(task)
        return {name: Times(tuple(each), self.clock) for name, each in samples.items()}


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
