"""Prometheus metrics of an engine and its tiers, registered by one call (`metrics`).

Values are read when Prometheus collects them, so answers are not slowed down. Labels are names of
engines, tiers and kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ragfuse.errors import InputError
from ragfuse.process.shared import shared
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.tier import Tier
from ragfuse.telemetry.counters import (
    FALLBACK_KINDS,
    TOKEN_FATES,
    TTFT_S,
    AnswerCounters,
    CounterSnapshot,
)

Registry = Any
"""A `CollectorRegistry` of prometheus_client."""
Metric = Any
"""A metric family of prometheus_client."""


class MeteredEngine(Protocol):
    """An engine, as far as metrics need it."""

    settings: Settings
    store: KVStore
    counters: AnswerCounters


class _Shown(NamedTuple):
    """An engine at one moment; `shares`: other tenants use its slow tiers, so that their sizes are
    not shown.
    """

    engine: MeteredEngine
    shares: bool
    counts: CounterSnapshot

    @property
    def tiers(self) -> Sequence[Tier]:
        """Its tiers."""
        return self.engine.store.tiers

    @property
    def sized(self) -> Iterable[Tier]:
        """Those of its tiers whose sizes are shown; a remote medium has metrics of its own."""
        return (tier for tier in self.tiers if not tier.remote and not (self.shares and tier.slow))


Rows = Mapping[str, float]
"""Values by their label."""


def _counts(name: str) -> Callable[[_Shown], Rows]:
    """Return a function that gives a counter of each tier."""
    return lambda shown: {tier.name: tier.counts[name] for tier in shown.tiers}


def _misses(shown: _Shown) -> Rows:
    """Return what each tier did not have: what a slower one gave, or none."""
    sums = shown.counts.sums
    missed, found = sums["missed"], dict[str, float]()
    for tier in reversed(shown.tiers):
        found[tier.name] = missed
        missed += sums[f"hit {tier.name}"]
    return found


METRICS: Sequence[tuple[str, str, str, str, Callable[[_Shown], Rows]]] = (
    (
        "Counter",
        "ragfuse_answers",
        "Answers, fused or by full prefill.",
        "how",
        lambda shown: {
            "fused": shown.counts.sums["fused"],
            "full": sum(shown.counts.sums[f"full {why}"] for why in FALLBACK_KINDS),
        },
    ),
    (
        "Counter",
        "ragfuse_answers_refused",
        "Answers by full prefill, and why nothing was fused.",
        "why",
        lambda shown: {why: shown.counts.sums[f"full {why}"] for why in FALLBACK_KINDS},
    ),
    (
        "Counter",
        "ragfuse_answers_failed",
        "Questions that ended in an error.",
        "",
        lambda shown: {"": shown.counts.sums["failed"]},
    ),
    (
        "Counter",
        "ragfuse_catalog_failures",
        (
            "Times that the store's catalog could not be read or written, and the engine went on"
            " from memory."
        ),
        "",
        lambda shown: {"": shown.counts.sums["catalog_failures"]},
    ),
    (
        "Counter",
        "ragfuse_prompt_tokens",
        "Tokens of prompts: reused from the store, reused and recomputed, or computed fresh.",
        "kind",
        lambda shown: {kind: shown.counts.sums[kind] for kind in TOKEN_FATES},
    ),
    (
        "Counter",
        "ragfuse_answer_tokens",
        "Tokens of answers.",
        "",
        lambda shown: {"": shown.counts.sums["written"]},
    ),
    (
        "Gauge",
        "ragfuse_waiting",
        "Runs of tokens that wait to be encoded in the background.",
        "",
        lambda shown: {"": shown.engine.counters.waiting},
    ),
    (
        "Counter",
        "ragfuse_tier_evictions",
        "Entries evicted for others.",
        "tier",
        _counts("evicted"),
    ),
    (
        "Counter",
        "ragfuse_tier_corrupt",
        "Entries that could not be read and were dropped.",
        "tier",
        _counts("corrupt"),
    ),
    (
        "Counter",
        "ragfuse_tier_refused_writes",
        "Writes refused for lack of space.",
        "tier",
        _counts("refused"),
    ),
    (
        "Counter",
        "ragfuse_tier_failures",
        "Calls that the tier's storage refused or did not answer.",
        "tier",
        _counts("failed"),
    ),
    (
        "Counter",
        "ragfuse_tier_hits",
        "Segments of prompts that were read from a tier.",
        "tier",
        lambda shown: {tier.name: shown.counts.sums[f"hit {tier.name}"] for tier in shown.tiers},
    ),
    (
        "Counter",
        "ragfuse_tier_misses",
        "Segments of prompts that were looked up in a tier without success.",
        "tier",
        _misses,
    ),
    (
        "Gauge",
        "ragfuse_tier_bytes",
        "Bytes stored in a tier.",
        "tier",
        lambda shown: {tier.name: tier.nbytes for tier in shown.sized},
    ),
    (
        "Gauge",
        "ragfuse_tier_capacity_bytes",
        "Capacity of a tier, in bytes.",
        "tier",
        lambda shown: {tier.name: tier.capacity for tier in shown.sized},
    ),
    (
        "Gauge",
        "ragfuse_tier_entries",
        "Entries stored in a tier, as far as is known.",
        "tier",
        lambda shown: {tier.name: len(tier.list()) for tier in shown.sized},
    ),
    (
        "Gauge",
        "ragfuse_tier_breaker_open",
        "1 while a tier is unreachable and therefore not used, else 0.",
        "tier",
        lambda shown: {tier.name: not tier.answers for tier in shown.tiers},
    ),
)
"""All metrics but the histogram: kind, name, help text, label beside that of the engine, and
values.
"""


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

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        from prometheus_client import core

        with self._lock:
            engines = {
                name: _Shown(*each, each[0].counters.now()) for name, each in self._engines.items()
            }
        if not engines:
            return
        for kind, metric, help_text, label, values_of in METRICS:
            labels = [label] if label else []
            family = getattr(core, f"{kind}MetricFamily")(
                metric, help_text, labels=["engine", *labels]
            )
            for name, shown in engines.items():
                for value, n in values_of(shown).items():
                    family.add_metric([name, value] if label else [name], float(n))
            yield family
        family = core.HistogramMetricFamily(
            "ragfuse_ttft_seconds", "Time to the first token.", labels=["engine"]
        )
        bounds = [*map(str, TTFT_S), "+Inf"]
        for name, shown in engines.items():
            family.add_metric(
                [name],
                list(zip(bounds, accumulate(shown.counts.ttft), strict=True)),
                shown.counts.ttft_s,
            )
        yield family
