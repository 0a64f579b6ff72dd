"""Throughput under load: full recompute, prefix caching and ragfuse behind the same server, one
after the other.

Each method's server starts empty, hears every question once, and is then asked at rates that are
shares of what it can do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from json import loads
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

import torch
from ragfuse_bench.options import ThroughputOptions
from ragfuse_bench.quality.cases import Packing, read_cases, set_name
from ragfuse_bench.throughput.asked import Request, drawn, each_once
from ragfuse_bench.throughput.load import SKIPPED, Heard, arrivals, offer, one_by_one, summed
from ragfuse_bench.throughput.report import show_throughput
from ragfuse_bench.throughput.served import Serving, serving
from ragfuse_bench.throughput.together import tokens_a_second
from rich.console import Console
from rich.progress import Progress

from ragfuse.calibration.case import Case
from ragfuse.calibration.runner import circumstances
from ragfuse.cli.options import prepare_model
from ragfuse.errors import RagFuseError
from ragfuse.settings import Settings
from ragfuse.telemetry.progress import progress

SYSTEM = "Answer in a few words, from the passages alone."
PATIENCE_S = 3600.0
COMPARED_TTFT = 2.0
"""Methods are compared where their mean time to first token is this many times that of full
recompute without load.
"""
ALONE = 3
"""Requests without any other, whose first token is the one without load."""
METHODS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = MappingProxyType(
    {
        "full": ({"reuse": False}, {"learn": "off"}),
        "prefix": ({"policy": "hkvd", "ratio": 1.0}, {"learn": "off"}),
        "ragfuse": ({}, {}),
    }
)
"""For each method, the fields of its requests and the options of its server. Where all rows of
chunks are recomputed, exact beginnings alone are reused: prefix caching.
"""


@dataclass(frozen=True)
class Measured:
    """One method: the seconds to its first token without load, requests a second that it can do,
    loads in numbers.
    """

    alone_s: float
    capacity: float
    loads: Sequence[Mapping[str, Any]]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(rate, mean seconds to the first token), the one without load first."""
        return [
            (0.0, self.alone_s),
            *((load["rate"], load["mean_s"]) for load in self.loads if load["mean_s"]),
        ]


def run_throughput(
    settings: Settings, options: ThroughputOptions, console: Console
) -> dict[str, Any]:
    """The result as plain JSON types; `console` shows progress and the table."""
    prepare_model(settings)
    cases = _cases(settings, options)
    found = dict[str, Measured]()
    with progress(console) as bar:
        for name, (_, told) in METHODS.items():
            task = bar.add_task(f"{name}: starting the server", total=None)
            with serving(
                settings, options.threads, PATIENCE_S, serve_together=options.together, **told
            ) as server:
                bench = _Bench(server, name, Path(settings.model).name, cases, options, bar)
                found[name] = bench.measured()
            bar.remove_task(task)
        found["prefix"] = better(found["prefix"], found["full"])
        batch = tokens_a_second(settings, [case.question for case in cases], options, bar)
    lost = sum(load["lost"] for each in found.values() for load in each.loads)
    result = {**compared(found), **batch, "lost": lost}
    given = {**vars(options), "sets": ", ".join(map(set_name, options.sets))}
    result |= {
        "skipped": f"1/{SKIPPED}",
        "options": {name: str(value) for name, value in given.items()},
    }
    result |= {
        "settings": {
            name: str(getattr(settings, name))
            for name in ("model", "dtype", "device", "memory_bytes")
        }
    }
    show_throughput(result, console)
    return {**result, **circumstances(torch.device(settings.device), options.threads)}


def _cases(settings: Settings, options: ThroughputOptions) -> list[Case]:
    from random import Random

    packing = Packing(lambda text: len(text) // 4, options.chunk_tokens, context_tokens=1 << 20)
    cases = [
        case for name in options.sets for case in read_cases(name, packing) if case.task == "answer"
    ]
    return Random(options.seed).sample(cases, min(options.cases, len(cases)))


class _Bench:
    """One method's server, and what it is asked."""

    def __init__(
        self,
        server: Serving,
        name: str,
        model: str,
        cases: Sequence[Case],
        options: ThroughputOptions,
        bar: Progress,
    ) -> None:
        self._server, self._name, self._model, self._cases = server, name, model, cases
        self._options, self._bar = options, bar

    def measured(self) -> Measured:
        """All of it, at all rates."""
        place, options = self._server.place, self._options
        first = self._bodies(each_once(self._cases, options.seed))
        for some in (first[:1], first):  # chunks are encoded behind a beginning that was met before
            self._sure(one_by_one(place, some, PATIENCE_S))
            self._settle()
        alone = self._sure(one_by_one(place, first[:ALONE], PATIENCE_S))
        began_s, busy = (
            time.monotonic(),
            self._bodies(drawn(self._cases, 2 * options.together, options.seed + 1)),
        )
        self._sure(one_by_one(place, busy, PATIENCE_S, options.together))
        capacity = len(busy) / (time.monotonic() - began_s)
        loads = [
            self.load(share * capacity, options.seconds, at)
            for at, share in enumerate(options.shares)
        ]
        return Measured(mean(one.first_s or 0.0 for one in alone), capacity, loads)

    def load(self, rate: float, seconds: float, number: int) -> dict[str, Any]:
        """One load of so many requests a second in numbers; at least one request comes."""
        seed = self._options.seed + 100 * number
        due = arrivals(rate, seconds, seed) or [0.0]
        bodies = self._bodies(drawn(self._cases, len(due), seed))
        task = self._bar.add_task(f"{self._name}: {rate:.2f} requests a second", total=len(due))
        found = offer(
            self._server.place, bodies, due, PATIENCE_S, lambda one: self._bar.advance(task)
        )
        self._bar.remove_task(task)
        return summed(rate, found)

    def _bodies(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        return [self._body(request) for request in requests]

    def _body(self, request: Request) -> dict[str, Any]:
        said = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": request.question},
        ]
        told = {"model": self._model, "messages": said, "documents": list(request.chunks)}
        return {
            **told,
            "max_tokens": self._options.answer_tokens,
            "ragfuse": dict(METHODS[self._name][0]),
        }

    def _sure(self, found: list[Heard]) -> list[Heard]:
        wrong = next((one.wrong for one in found if one.wrong), "")
        if wrong:
            raise RagFuseError(f"The server ({self._name}) did not answer: {wrong}")
        return found

    def _settle(self) -> None:
        """Wait until all that was met is encoded."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s and self._told()["waiting_to_be_encoded"]:
            time.sleep(0.2)

    def _told(self) -> dict[str, Any]:
        line = HTTPConnection(*self._server.place, timeout=60)
        try:
            line.request("GET", "/v1/ragfuse/store")
            told: dict[str, Any] = loads(line.getresponse().read())
        finally:
            line.close()
        return told


def better(prefix: Measured, full: Measured) -> Measured:
    """Return prefix caching, or full recompute where that is faster: who has both takes the better
    one.
    """
    return prefix if prefix.alone_s <= full.alone_s else full


def rate_at(curve: Sequence[tuple[float, float]], ttft_s: float) -> tuple[float, bool]:
    """The highest rate at which the mean first token takes no longer, between two that were
    measured as if it grew evenly; and whether it is the highest that was measured, so that a higher
    one might do.
    """
    points = sorted(curve)
    highest = 0.0
    for (slow, early_s), (fast, late_s) in pairwise(points):
        if early_s <= ttft_s < late_s:
            highest = slow + (fast - slow) * (ttft_s - early_s) / (late_s - early_s)
    if points and points[-1][1] <= ttft_s:
        return points[-1][0], True
    return highest, False


def compared(found: Mapping[str, Measured]) -> dict[str, Any]:
    """The curves side by side, and how many times the rate ragfuse takes at the same time to the
    first token.
    """
    ttft_s = COMPARED_TTFT * found["full"].alone_s
    rates = {name: rate_at(each.curve, ttft_s) for name, each in found.items()}
    loads = {name: {load["rate"]: load for load in each.loads} for name, each in found.items()}
    curve = [
        {
            "rate": rate,
            **{name: loads[name].get(rate, {}).get("mean_s") for name in loads},
            "p95": {name: loads[name].get(rate, {}).get("p95_s") for name in loads},
        }
        for rate in sorted({rate for each in loads.values() for rate in each})
    ]
    return {
        "rate_x_vs_full": _times(rates["ragfuse"][0], rates["full"][0]),
        "rate_x_vs_prefix": _times(rates["ragfuse"][0], rates["prefix"][0]),
        "curve": curve,
        "at_ttft_s": ttft_s,
        "rates": {name: {"rate": rate, "at_least": bound} for name, (rate, bound) in rates.items()},
        "methods": {
            name: {"alone_s": each.alone_s, "capacity": each.capacity, "loads": list(each.loads)}
            for name, each in found.items()
        },
    }


def _times(one: float, other: float) -> float | None:
    return one / other if other else None
