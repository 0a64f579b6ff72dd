"""Prometheus metrics of an engine and its tiers, registered by one call (`metrics`).

Values are read when Prometheus collects them, so answers are not slowed down. Labels are names of
engines, tiers and kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import shared
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.telemetry.counters import (
    FALLBACK_KINDS,
    TOKEN_FATES,
    TTFT_S,
    AnswerCounters,
    CounterSnapshot,
)

Registry = Any
"""A `CollectorRegistry` of prometheus_client."""
Values = Mapping[str, float]
"""Values by their label."""


class MeteredEngine(Protocol):
    """An engine, as far as metrics need it."""

    settings: Settings
    store: KVStore
    counters: AnswerCounters


def _counters(
    engine: MeteredEngine, counts: CounterSnapshot
) -> Iterator[tuple[str, str, str, Values]]:
    """Yield the name, help text, label beside that of the engine, and values of each counter."""
    sums, tiers = counts.sums, engine.store.tiers
    refused = {why: sums[f"full {why}"] for why in FALLBACK_KINDS}
    answers = {"fused": sums["fused"], "full": sum(refused.values())}
    yield "answers", "Answers, fused or by full prefill.", "how", answers
    yield "answers_refused", "Answers by full prefill, and why nothing was fused.", "why", refused
    yield "answers_failed", "Questions that ended in an error.", "", {"": sums["failed"]}
    catalog = (
        "Times that the store's catalog could not be read or written, and the engine went on from"
        " memory."
    )
    yield "catalog_failures", catalog, "", {"": sums["catalog_failures"]}
    fates = "Tokens of prompts: reused from the store, reused and recomputed, or computed fresh."
    yield "prompt_tokens", fates, "kind", {kind: sums[kind] for kind in TOKEN_FATES}
    yield "answer_tokens", "Tokens of answers.", "", {"": sums["written"]}
    for name, what, help_text in (
        ("evictions", "evicted", "Entries evicted for others."),
        ("corrupt", "corrupt", "Entries that could not be read and were dropped."),
        ("refused_writes", "refused", "Writes refused for lack of space."),
        ("failures", "failed", "Calls that the tier's storage refused or did not answer."),
    ):
        yield f"tier_{name}", help_text, "tier", {tier.name: tier.counts[what] for tier in tiers}
    hits = {tier.name: sums[f"hit {tier.name}"] for tier in tiers}
    yield "tier_hits", "Segments of prompts that were read from a tier.", "tier", hits
    # A tier misses what a slower one gave, and what none had.
    missed = accumulate(reversed(hits.values()), initial=sums["missed"])
    misses = dict(zip(reversed(hits), missed, strict=False))
    help_text = "Segments of prompts that were looked up in a tier without success."
    yield "tier_misses", help_text, "tier", misses


def _gauges(engine: MeteredEngine, shares: bool) -> Iterator[tuple[str, str, str, Values]]:
    """Yield name, help text, label and values of each gauge.

    Sizes of slow tiers are left out if other tenants share them (`shares`), and those of remote
    tiers always, as their servers have metrics of their own.
    """
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
    """Export an engine's metrics to Prometheus until the engine is closed. A second call for an
    engine does nothing.

    Args:
        engine: The engine.
        registry: The `CollectorRegistry`; None for the default one.
        name: The value of the label `engine`; "" for the model's name. A number is added where it
            is taken.
        shares: Whether other tenants use the same slow tiers, whose bytes and entries are then not
            exported.

    Raises:
        InputError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise InputError(
            "Metrics need the package prometheus-client, which is not installed: pip install"
            " 'ragfuse-kv[telemetry]'"
        ) from error
    target = REGISTRY if registry is None else registry
    collector = shared(("metrics", target), lambda: _Collector(target))
    collector.add(engine, name or Path(engine.settings.model).name, shares)


class _Collector:
    """The collector of all engines in one registry; they share it, as a registry accepts each
    metric name once.
    """

    def __init__(self, registry: Registry) -> None:
        self._lock = threading.Lock()
        self._engines: dict[str, tuple[MeteredEngine, bool]] = {}
        registry.register(self)

    def add(self, engine: MeteredEngine, name: str, shares: bool) -> None:
        """Add an engine under this name, numbered if taken, until it is closed."""
        with self._lock:
            if any(engine is other for other, _ in self._engines.values()):
                return
            names = (name, *(f"{name}-{number}" for number in range(2, len(self._engines) + 3)))
            name = next(candidate for candidate in names if candidate not in self._engines)
            self._engines[name] = engine, shares
        engine.counters.when_closed(lambda: self._engines.pop(name))

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
