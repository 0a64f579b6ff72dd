"""Prometheus metrics of an engine and its tiers, registered by one call (`metrics`).

Values are read when Prometheus collects them, so answers are not slowed down. Labels are names of engines, tiers and
kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import shared
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.tier import Tier
from ragfuse.telemetry.counters import FALLBACK_KINDS, TOKEN_FATES, TTFT_S, AnswerCounters, CounterSnapshot

Registry = Any
"""A `CollectorRegistry` of prometheus_client."""
Metric = Any
"""A metric family of prometheus_client."""
Rows = dict[tuple[str, ...], float]
"""Values by their labels, without the label of the engine."""

ANSWERS: Sequence[tuple[str, str, tuple[str, ...], Callable[[Mapping[str, int]], Rows]]] = (
    (
        "ragfuse_answers",
        "Answers, fused or by full prefill.",
        ("how",),
        lambda sums: {("fused",): sums["fused"], ("full",): sum(sums[f"full {why}"] for why in FALLBACK_KINDS)},
    ),
    (
        "ragfuse_answers_refused",
        "Answers by full prefill, and why nothing was fused.",
        ("why",),
        lambda sums: {(why,): sums[f"full {why}"] for why in FALLBACK_KINDS},
    ),
    ("ragfuse_answers_failed", "Questions that ended in an error.", (), lambda sums: {(): sums["failed"]}),
    (
        "ragfuse_catalog_failures",
        "Times that the store's catalog could not be read or written, and the engine went on from memory.",
        (),
        lambda sums: {(): sums["catalog_failures"]},
    ),
    (
        "ragfuse_prompt_tokens",
        "Tokens of prompts: reused from the store, reused and recomputed, or computed fresh.",
        ("kind",),
        lambda sums: {(kind,): sums[kind] for kind in TOKEN_FATES},
    ),
    ("ragfuse_answer_tokens", "Tokens of answers.", (), lambda sums: {(): sums["written"]}),
)
"""Counters of answers: name, help text, labels, and a function that returns the values from the sums of a snapshot."""
TIER_COUNTS = MappingProxyType(
    {
        "evicted": ("ragfuse_tier_evictions", "Entries evicted for others."),
        "corrupt": ("ragfuse_tier_corrupt", "Entries that could not be read and were dropped."),
        "refused": ("ragfuse_tier_refused_writes", "Writes refused for lack of space."),
        "failed": ("ragfuse_tier_failures", "Calls that the tier's storage refused or did not answer."),
    }
)
"""Counters of a tier: name and help text, by their key in `Tier.counts`."""
TIER_STATES: Sequence[tuple[str, str, Callable[[Tier], float]]] = (
    ("ragfuse_tier_bytes", "Bytes stored in a tier.", lambda tier: tier.nbytes),
    ("ragfuse_tier_capacity_bytes", "Capacity of a tier, in bytes.", lambda tier: tier.capacity),
    (
        "ragfuse_tier_entries",
        "Entries stored in a tier, as far as is known.",
        lambda tier: len(tier.list()),
    ),
    (
        "ragfuse_tier_breaker_open",
        "1 while a tier is unreachable and therefore not used, else 0.",
        lambda tier: not tier.answers,
    ),
)
"""Gauges of a tier: name, help text, and value."""
SIZE_GAUGES = frozenset({"ragfuse_tier_bytes", "ragfuse_tier_entries", "ragfuse_tier_capacity_bytes"})
"""Gauges of what a tier holds, of all its tenants."""


class MeteredEngine(Protocol):
    """An engine, as far as metrics need it."""

    settings: Settings
    store: KVStore
    counters: AnswerCounters


def metrics(engine: MeteredEngine, registry: Registry | None = None, name: str = "", shares: bool = False) -> None:
    """Export an engine's metrics to Prometheus until the engine is closed. A second call for an engine does nothing.

    Args:
        engine: The engine.
        registry: The `CollectorRegistry`; None for the default one.
        name: The value of the label `engine`; "" for the model's name. A number is added where it is taken.
        shares: Whether other tenants use the same slow tiers, whose bytes and entries are then not exported.

    Raises:
        InputError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise InputError(
            "Metrics need the package prometheus-client, which is not installed: pip install 'ragfuse-kv[telemetry]'"
        ) from error
    target = REGISTRY if registry is None else registry
    collector = shared(("metrics", target), lambda: _Collector(target))
    collector.add(engine, name or Path(engine.settings.model).name, shares)


class _Collector:
    """The collector of all engines in one registry; they share it, as a registry accepts each metric name once."""

    def __init__(self, registry: Registry) -> None:
        self._lock = threading.Lock()
        self._engines: dict[str, MeteredEngine] = {}
        self._shares = set[str]()
        registry.register(self)

    def add(self, engine: MeteredEngine, name: str, shares: bool) -> None:
        """Add an engine under this name, numbered if taken, until it is closed."""
        with self._lock:
            if engine in self._engines.values():
                return
            names = (name, *(f"{name}-{number}" for number in range(2, len(self._engines) + 3)))
            name = next(candidate for candidate in names if candidate not in self._engines)
            self._engines[name] = engine
            if shares:
                self._shares.add(name)
        engine.counters.when_closed(lambda: self._hide(name))

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        with self._lock:
            engines = dict(self._engines)
        if not engines:
            return
        snapshots = {name: engine.counters.now() for name, engine in engines.items()}
        yield from _answer_metrics(snapshots)
        yield _ttft_histogram(snapshots)
        yield from _tier_metrics(engines, snapshots, self._shares)
        waiting = _family("Gauge", "ragfuse_waiting", "Runs of tokens that wait to be encoded in the background.", ())
        for name, engine in engines.items():
            waiting.add_metric([name], engine.counters.waiting)
        yield waiting

    def _hide(self, name: str) -> None:
        with self._lock:
            del self._engines[name]
            self._shares.discard(name)


def _answer_metrics(snapshots: Mapping[str, CounterSnapshot]) -> Iterator[Metric]:
    for name, help_text, labels, values_of in ANSWERS:
        metric = _family("Counter", name, help_text, labels)
        for engine, snapshot in snapshots.items():
            for label_values, n in values_of(snapshot.sums).items():
                metric.add_metric([engine, *label_values], n)
        yield metric


def _ttft_histogram(snapshots: Mapping[str, CounterSnapshot]) -> Metric:
    """Return the histogram of the time to first token."""
    metric = _family("Histogram", "ragfuse_ttft_seconds", "Time to the first token.", ())
    for engine, snapshot in snapshots.items():
        bounds = [*map(str, TTFT_S), "+Inf"]
        metric.add_metric(
            [engine], [(bound, sum(snapshot.ttft[: at + 1])) for at, bound in enumerate(bounds)], snapshot.ttft_s
        )
    return metric


def _tier_metrics(
    engines: Mapping[str, MeteredEngine], snapshots: Mapping[str, CounterSnapshot], shares: Collection[str]
) -> Iterator[Metric]:
    """Yield the metrics of tiers; `shares` names the engines that share slow tiers with other tenants."""
    tiers = [(name, tier) for name, engine in engines.items() for tier in engine.store.tiers]
    for count, (metric_name, help_text) in TIER_COUNTS.items():
        metric = _family("Counter", metric_name, help_text, ("tier",))
        for name, tier in tiers:
            metric.add_metric([name, tier.name], tier.counts[count])
        yield metric
    for metric_name, help_text, value in TIER_STATES:
        gauge = _family("Gauge", metric_name, help_text, ("tier",))
        for name, tier in tiers:
            is_hidden = tier.remote or (name in shares and tier.slow)  # a remote medium has metrics of its own
            if not (is_hidden and metric_name in SIZE_GAUGES):
                gauge.add_metric([name, tier.name], float(value(tier)))
        yield gauge
    hits = _family("Counter", "ragfuse_tier_hits", "Segments of prompts that were read from a tier.", ("tier",))
    misses = _family(
        "Counter",
        "ragfuse_tier_misses",
        "Segments of prompts that were looked up in a tier without success.",
        ("tier",),
    )
    for name, engine in engines.items():
        tier_misses = snapshots[name].sums["missed"]
        for tier in reversed(engine.store.tiers):
            misses.add_metric([name, tier.name], tier_misses)
            hit = snapshots[name].sums[f"hit {tier.name}"]
            hits.add_metric([name, tier.name], hit)
            tier_misses += hit
    yield from (hits, misses)


def _family(kind: str, name: str, help_text: str, labels: Sequence[str]) -> Any:
    from prometheus_client import core

    return getattr(core, f"{kind}MetricFamily")(name, help_text, labels=["engine", *labels])
