"""Prometheus metrics of an engine and its tiers, registered by one call (`metrics`).

Values are read when Prometheus collects them, so answers are not slowed down. Labels are names of engines, tiers and
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from ragfuse.errors import InputError
from ragfuse.process.fork import ForkLock
from ragfuse.process.shared import forget, shared
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.tier import Breaks, Numbers, Tier
from ragfuse.telemetry.counters import TOKEN_FATES, TTFT_S, WHY, AnswerCounters, CounterSnapshot

Registry = Any
"""A `CollectorRegistry` of prometheus_client."""
Metric = Any
"""A metric family of prometheus_client."""
Rows = dict[tuple[str, ...], float]
"""Values by their labels, without the label of the engine."""

ANSWERS: Sequence[tuple[str, str, tuple[str, ...], Callable[[CounterSnapshot], Rows]]] = (
    (
        "ragfuse_answers",
        "Answers, fused or by full prefill.",
        ("how",),
        lambda counted: {
            ("fused",): counted.sums["fused"],
            ("full",): sum(counted.sums[f"full {why}"] for why in WHY),
        },
    ),
    (
        "ragfuse_answers_refused",
        "Answers by full prefill, and why nothing was fused.",
        ("why",),
        lambda counted: {(why,): counted.sums[f"full {why}"] for why in WHY},
    ),
    (
        "ragfuse_answers_failed",
        "Questions that ended in an error.",
        (),
        lambda counted: {(): counted.sums["failed"]},
    ),
    (
        "ragfuse_catalog_failures",
        "Times that the store's catalog could not be read or written, and the engine went on from memory.",
        (),
        lambda counted: {(): counted.sums["catalog_failures"]},
    ),
    (
        "ragfuse_prompt_tokens",
        "Tokens of prompts: reused from the store, reused and recomputed, or computed fresh.",
        ("kind",),
        lambda counted: {(kind,): counted.sums[kind] for kind in TOKEN_FATES},
    ),
    (
        "ragfuse_answer_tokens",
        "Tokens of answers.",
        (),
        lambda counted: {(): counted.sums["written"]},
    ),
)
"""Counters of answers: name, help text, labels, and a function that returns the values."""
TIER_COUNTS = MappingProxyType(
    {
        "evicted": ("ragfuse_tier_evictions", "Entries that made room for others."),
        "corrupt": ("ragfuse_tier_corrupt", "Entries that could not be read and were dropped."),
        "refused": ("ragfuse_tier_refused_writes", "Writes that found no room."),
        "failed": ("ragfuse_tier_failures", "Calls that the medium refused or did not answer."),
        "promoted": ("ragfuse_tier_promotions", "Entries copied in because they are used often."),
    }
)
"""Counters of a tier: name and help text, by their key in `Tier.counts`."""
TIER_STATES: Sequence[tuple[str, str, Callable[[Tier], float]]] = (
    ("ragfuse_tier_bytes", "Bytes kept in a tier.", lambda tier: tier.nbytes),
    ("ragfuse_tier_capacity_bytes", "Bytes that a tier may keep.", lambda tier: tier.capacity),
    (
        "ragfuse_tier_entries",
        "Entries kept in a tier, as far as is known.",
        lambda tier: tier.n_entries if isinstance(tier, Numbers) else len(tier.entries()),
    ),
    (
        "ragfuse_tier_breaker_open",
        "1 while a tier is left out because its medium does not answer, else 0.",
        lambda tier: isinstance(tier, Breaks) and tier.breaker.is_open,
    ),
)
"""Gauges of a tier: name, help text, and value. The breaker is last, as reading the others may open it."""
SHARED_GAUGES = frozenset({"ragfuse_tier_bytes", "ragfuse_tier_entries"})
"""Gauges that include the entries of all tenants of a tier."""


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
    place = REGISTRY if registry is None else registry
    name = name or Path(engine.settings.model).name
    while not shared(("metrics", place), lambda: _Shown(place)).show(engine, name, shares):
        pass


class _Shown:
    """The collector of all engines in one registry; they share it, as a registry accepts each metric name once."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self._lock, self._over = registry, ForkLock(), False
        self._engines: dict[str, MeteredEngine] = {}
        self._shares = set[str]()

    def show(self, engine: MeteredEngine, name: str, shares: bool) -> bool:
        """Add an engine under this name, numbered if taken; return False if the collector was just unregistered."""
        with self._lock:
            if self._over or engine in self._engines.values():
                return not self._over
            names = (name, *(f"{name}-{number}" for number in range(2, len(self._engines) + 3)))
            name = next(each for each in names if each not in self._engines)
            if not self._engines:
                self._registry.register(self)
            self._engines[name] = engine
            if shares:
                self._shares.add(name)
        engine.counters.when_closed(lambda: self._hide(name))
        return True

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, for registration; no tier is queried."""
        return self._read({})

    def collect(self) -> Iterable[Metric]:
        """Return all metrics with their current values."""
        with self._lock:
            engines = dict(self._engines)
        return self._read(engines)

    def _read(self, engines: Mapping[str, MeteredEngine]) -> Iterator[Metric]:
        counted = {name: engine.counters.now() for name, engine in engines.items()}
        yield from _of_answers(counted)
        yield _times(counted)
        yield from _of_tiers(engines, counted, self._shares)
        waiting = _gauge("ragfuse_waiting", "Runs of tokens that wait to be encoded in the background.", ())
        for name, engine in engines.items():
            waiting.add_metric([name], engine.counters.waiting)
        yield waiting

    def _hide(self, name: str) -> None:
        with self._lock:
            del self._engines[name]
            self._shares.discard(name)
            self._over = not self._engines
            if self._over:
                self._registry.unregister(self)
                forget(self)


def _of_answers(counted: Mapping[str, CounterSnapshot]) -> Iterator[Metric]:
    for name, what, labels, rows in ANSWERS:
        metric = _counter(name, what, labels)
        for engine, found in counted.items():
            for values, n in rows(found).items():
                metric.add_metric([engine, *values], n)
        yield metric


def _times(counted: Mapping[str, CounterSnapshot]) -> Metric:
    """Return the histogram of the time to first token."""
    from prometheus_client.core import HistogramMetricFamily

    metric = HistogramMetricFamily("ragfuse_ttft_seconds", "Time to the first token.", labels=["engine"])
    for engine, found in counted.items():
        ends = [*map(str, TTFT_S), "+Inf"]
        metric.add_metric([engine], [(end, sum(found.ttft[: at + 1])) for at, end in enumerate(ends)], found.ttft_s)
    return metric


def _of_tiers(
    engines: Mapping[str, MeteredEngine], counted: Mapping[str, CounterSnapshot], shares: Collection[str]
) -> Iterator[Metric]:
    """Yield the metrics of tiers; `shares` names the engines that share slow tiers with other tenants."""
    tiers = [(name, tier) for name, engine in engines.items() for tier in engine.store.tiers]
    for count, (title, what) in TIER_COUNTS.items():
        metric = _counter(title, what, ("tier",))
        for name, tier in tiers:
            metric.add_metric([name, tier.name], tier.counts[count])
        yield metric
    for title, what, value in TIER_STATES:
        gauge = _gauge(title, what, ("tier",))
        for name, tier in tiers:
            if not (name in shares and tier.slow and title in SHARED_GAUGES):
                gauge.add_metric([name, tier.name], float(value(tier)))
        yield gauge
    hits = _counter("ragfuse_tier_hits", "Segments of prompts that a tier gave.", ("tier",))
    misses = _counter("ragfuse_tier_misses", "Segments of prompts that a tier was asked for in vain.", ("tier",))
    for name, engine in engines.items():
        later = counted[name].sums["missed"]
        for tier in reversed(engine.store.tiers):
            misses.add_metric([name, tier.name], later)
            found = counted[name].sums[f"hit {tier.name}"]
            hits.add_metric([name, tier.name], found)
            later += found
    yield from (hits, misses)


def _counter(name: str, what: str, labels: Sequence[str]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, what, labels=["engine", *labels])


def _gauge(name: str, what: str, labels: Sequence[str]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, what, labels=["engine", *labels])
