"""Count an engine's answers and their tokens, and export the counts to Prometheus.

Labels never contain a document, a question or a key, so there are few time series. Metrics are made
only when Prometheus collects them, so answers are not slowed down.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import shared
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.types import plan
from ragfuse.types.answer import Answer, Trace

TTFT_S = (0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 60.0)
"""Upper bounds of the buckets for TTFT, in seconds; a further bucket counts longer times."""
TOKEN_FATES = ("reused", "recomputed", "fresh")
"""Kinds of prompt tokens: KV loaded and reused, KV loaded but recomputed, or no KV loaded."""
_KIND_BY_REASON = MappingProxyType(
    {
        plan.FULL_PREFILL_ASKED: "asked",
        plan.NOTHING_STORED: "nothing_stored",
        plan.NOT_ENCODED: "nothing_stored",
        plan.ENCODING: "nothing_stored",
        plan.PROMPT_TOO_SHORT: "too_short",
        plan.DOCUMENTS_ALTERED: "altered",
        plan.NOT_EXACT: "inexact",
        plan.NOT_SAFE: "unsafe",
        "full prefill ": "faster",  # last, because FULL_PREFILL_ASKED begins with these words too
    }
)
FALLBACK_KINDS = (*dict.fromkeys(_KIND_BY_REASON.values()), "model")
"""Short names of the reasons for full prefill. "model": KV of the model cannot be reused."""


def fallback_kind(reason: str) -> str:
    """Return a fallback reason's short name, from `FALLBACK_KINDS`. "" stays ""."""
    return next(
        (kind for prefix, kind in _KIND_BY_REASON.items() if reason.startswith(prefix)),
        "model" if reason else "",
    )


@dataclass(frozen=True)
class CounterSnapshot:
    """The values of an engine's counters at one moment.

    Args:
        sums: The counters' values since the engine was created, by name.
        ttft: Number of answers in each bucket of `TTFT_S`, then the number of slower answers.
        ttft_s: Sum of all times to first token, in seconds.
    """

    sums: Counter[str]
    ttft: Sequence[int]
    ttft_s: float


class AnswerCounters:
    """The counters of one engine's answers. Thread-safe.

    Args:
        waiting: Returns the number of queued and running encoding jobs.
        catalog_failures: Returns the number of failed catalog reads and writes.

    Attributes:
        at_close: Has the callbacks to call when the engine is closed.
    """

    def __init__(self, waiting: Callable[[], int], catalog_failures: Callable[[], int]) -> None:
        self.waiting, self._catalog_failures = waiting, catalog_failures
        self.at_close = ExitStack()
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._ttft, self._ttft_s = [0] * (len(TTFT_S) + 1), 0.0

    def add(self, answer: Answer) -> None:
        """Count an answer and its tokens, lookups and TTFT."""
        trace = answer.trace
        fallback = fallback_kind(trace.fallback_reason)
        sums = Counter(
            {f"full {fallback}" if fallback else "fused": 1, "written": len(answer.token_ids)}
        )
        sums.update({fate: getattr(trace, f"tokens_{fate}") for fate in TOKEN_FATES})
        sums.update(_lookups(trace, fallback))
        with self._lock:
            self._sums.update(sums)
            self._ttft[bisect_left(TTFT_S, trace.ttft_s)] += 1
            self._ttft_s += trace.ttft_s

    def fail(self) -> None:
        """Count a request that failed."""
        with self._lock:
            self._sums["failed"] += 1

    def now(self) -> CounterSnapshot:
        """Return a consistent snapshot of all counts."""
        with self._lock:
            sums = Counter(self._sums)
            sums["catalog_failures"] = self._catalog_failures()
            return CounterSnapshot(sums, tuple(self._ttft), self._ttft_s)


def _lookups(trace: Trace, fallback: str) -> Iterator[str]:
    """For each segment that was looked up in the store, yield "hit <tier>" or "missed"."""
    if fallback in ("", "nothing_stored"):
        for segment in trace.segments:
            if segment.goes_on:
                continue
            if segment.hit:
                yield f"hit {segment.tier}"
            elif fallback or segment.why in (plan.MISSING, plan.UNREADABLE, plan.ENCODING):
                yield "missed"


Registry = Any
Values = Mapping[str, float]


class MeteredEngine(Protocol):
    """The attributes of an engine that metrics read."""

    settings: Settings
    store: KVStore
    counters: AnswerCounters


def _counters(
    engine: MeteredEngine, counts: CounterSnapshot
) -> Iterator[tuple[str, str, str, Values]]:
    """Yield (name, help text, label name, values by label) of each counter."""
    sums, tiers = counts.sums, engine.store.tiers
    refused = {why: sums[f"full {why}"] for why in FALLBACK_KINDS}
    answers = {"fused": sums["fused"], "full": sum(refused.values())}
    yield "answers", "Answers, fused or by full prefill.", "how", answers
    yield "answers_refused", "Answers by full prefill, and why nothing was fused.", "why", refused
    yield (
        "answers_failed",
        "Questions that ended in an error, also for invalid requests.",
        "",
        {"": sums["failed"]},
    )
    catalog = "Times that the store's catalog failed, and the engine continued from memory."
    yield "catalog_failures", catalog, "", {"": sums["catalog_failures"]}
    fates = "Tokens of prompts: reused from the store, reused and recomputed, or computed fresh."
    yield "prompt_tokens", fates, "kind", {kind: sums[kind] for kind in TOKEN_FATES}
    yield "answer_tokens", "Tokens of answers.", "", {"": sums["written"]}
    for name, what, help_text in (
        ("evictions", "evicted", "Entries evicted to make room."),
        ("corrupt", "corrupt", "Entries that could not be read and were dropped."),
        ("refused_writes", "refused", "Writes refused for lack of space."),
        ("failures", "failed", "Calls that the tier's storage refused or did not answer."),
    ):
        yield f"tier_{name}", help_text, "tier", {tier.name: tier.counts[what] for tier in tiers}
    hits = {tier.name: sums[f"hit {tier.name}"] for tier in tiers}
    yield "tier_hits", "Segments of prompts that were read from a tier.", "tier", hits
    # Lookups go from fast to slow: a segment found in a slow tier was missed by all faster tiers.
    missed = accumulate(reversed(hits.values()), initial=sums["missed"])
    misses = dict(zip(reversed(hits), missed, strict=False))
    help_text = "Segments of prompts that were looked up in a tier without success."
    yield "tier_misses", help_text, "tier", misses


def _gauges(engine: MeteredEngine, shares: bool) -> Iterator[tuple[str, str, str, Values]]:
    """Yield gauges in the form of `_counters`. If `shares`, leave out the sizes of slow tiers."""
    tiers = engine.store.tiers
    sized = [tier for tier in tiers if not tier.remote and not (shares and tier.slow)]
    waiting = "Runs of tokens that wait to be encoded in the background."
    yield "waiting", waiting, "", {"": engine.counters.waiting()}
    nbytes = {tier.name: tier.nbytes for tier in sized}
    yield "tier_bytes", "Bytes stored in a tier.", "tier", nbytes
    capacities = {tier.name: tier.capacity for tier in sized}
    yield "tier_capacity_bytes", "Capacity of a tier, in bytes.", "tier", capacities
    entries = {tier.name: len(tier.list()) for tier in sized}
    yield "tier_entries", "Entries stored in a tier, as far as is known.", "tier", entries
    is_open = {tier.name: not tier.answers for tier in tiers}
    unreachable = "1 while a tier is unreachable and therefore not used, else 0."
    yield "tier_breaker_open", unreachable, "tier", is_open


def metrics(
    engine: MeteredEngine, registry: Registry | None = None, name: str = "", shares: bool = False
) -> None:
    """Export an engine's metrics to Prometheus until the engine is closed. A second call for the
    same engine does nothing.

    Args:
        engine: The engine.
        registry: The `CollectorRegistry`. None means the default registry of prometheus-client.
        name: The value of the label `engine`; "" means the model's name. If another engine has that
            name, a number is appended.
        shares: True if tenants share the slow tiers. The sizes of slow tiers are then left out.

    Raises:
        InputError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise InputError(
            "Metrics need prometheus-client. Run: pip install 'ragfuse-kv[telemetry]'"
        ) from error
    target = REGISTRY if registry is None else registry
    collector = shared(("metrics", target), lambda: _Collector(target))
    collector.add(engine, name or Path(engine.settings.model).name, shares)


class _Collector:
    """One collector for all engines, because a registry accepts each metric name only once."""

    def __init__(self, registry: Registry) -> None:
        self._lock = threading.Lock()
        self._engines: dict[str, tuple[MeteredEngine, bool]] = {}
        registry.register(self)

    def add(self, engine: MeteredEngine, name: str, shares: bool) -> None:
        """Add an engine. Drop the engine when it is closed. If `name` is taken, append a number."""
        with self._lock:
            if any(engine is other for other, _ in self._engines.values()):
                return
            names = (name, *(f"{name}-{number}" for number in range(2, len(self._engines) + 3)))
            name = next(candidate for candidate in names if candidate not in self._engines)
            self._engines[name] = engine, shares
        engine.counters.at_close.callback(self._engines.pop, name)

    def collect(self) -> Iterator[Any]:
        """Yield all metrics with their current values."""
        from prometheus_client import core

        with self._lock:
            engines = dict(self._engines)
        families: dict[str, Any] = {}

        def family(kind: Any, name: str, help_text: str, *labels: str) -> Any:
            made = kind(f"ragfuse_{name}", help_text, labels=["engine", *filter(None, labels)])
            return families.setdefault(name, made)

        for name, (engine, shares) in engines.items():
            counts = engine.counters.now()
            for kind, rows in (
                (core.CounterMetricFamily, _counters(engine, counts)),
                (core.GaugeMetricFamily, _gauges(engine, shares)),
            ):
                for metric, help_text, label, values in rows:
                    for value, n in values.items():
                        labels = [name, *filter(None, [value])]
                        family(kind, metric, help_text, label).add_metric(labels, float(n))
            buckets = zip([*map(str, TTFT_S), "+Inf"], accumulate(counts.ttft), strict=True)
            ttft = family(core.HistogramMetricFamily, "ttft_seconds", "Time to the first token.")
            ttft.add_metric([name], list(buckets), counts.ttft_s)
        yield from families.values()
