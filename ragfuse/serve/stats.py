"""Prometheus metrics of a server's requests and of each tenant's engine, and a summary of a tenant's store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ragfuse.admin.quotas import QuotaKeeper
from ragfuse.engine.engine import Engine
from ragfuse.serve.request_queue import JobQueue
from ragfuse.telemetry.prometheus import metrics


class ServerCounts:
    """The metrics of a server: requests by path and status, waiting and running requests, and each tenant's engine.

    A tenant sees the metrics of its own engine only. Thread-safe.
    """

    def __init__(self, jobs: JobQueue[Any]) -> None:
        from prometheus_client import CollectorRegistry

        self._registry, self._tenant_registries = CollectorRegistry(), dict[str, CollectorRegistry]()
        self._jobs, self._lock = jobs, threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._registry.register(self)

    def count(self, path: str, status: int) -> None:
        """Count one request by the path of its route, such as "/v1/ragfuse/schemas/{name}"."""
        with self._lock:
            self._counts[path, str(status)] += 1

    def show(self, engine: Engine, salt: str, name: str, keeper: QuotaKeeper, shares: bool = False) -> None:
        """Add the metrics of a tenant's engine and of its quota, visible to that tenant until the engine is closed.

        Args:
            engine: The tenant's engine.
            salt: The tenant's salt.
            name: Value of the label "engine".
            keeper: Keeps the tenant within its quota.
            shares: Whether other tenants use the same slow tiers, whose totals are then not shown.
        """
        from prometheus_client import CollectorRegistry

        with self._lock:
            registry = self._tenant_registries.setdefault(salt, CollectorRegistry())
        metrics(engine, registry, name, shares)
        registry.register(_QuotaMetrics(keeper, name))

    def text(self, salt: str) -> bytes:
        """Return the metrics that the tenant of this salt may see, in Prometheus' text format."""
        from prometheus_client import generate_latest

        with self._lock:
            registry = self._tenant_registries.get(salt)
        return generate_latest(self._registry) + (generate_latest(registry) if registry is not None else b"")

    def describe(self) -> Iterable[Any]:
        """Return the metric families, for Prometheus' registry."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families with their current values."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            counts = dict(self._counts)
        requests = CounterMetricFamily("ragfuse_requests", "Requests, by path and status.", labels=["path", "status"])
        for labels, n in counts.items():
            requests.add_metric(labels, n)
        yield requests
        waiting, running = len(self._jobs), self._jobs.running
        yield GaugeMetricFamily("ragfuse_requests_waiting", "Requests that wait for their turn.", value=waiting)
        yield GaugeMetricFamily("ragfuse_requests_running", "Requests that are being answered.", value=running)


class _QuotaMetrics:
    """The metrics of a tenant's quota: its use as last counted, its limits, its evictions."""

    def __init__(self, keeper: QuotaKeeper, name: str) -> None:
        self._keeper, self._name = keeper, name

    def describe(self) -> Iterable[Any]:
        """Return the metric families, for Prometheus' registry."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families with their current values."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        use, engine = self._keeper.use, [self._name]
        nbytes = GaugeMetricFamily("ragfuse_tenant_bytes", "Bytes of the tenant's KV.", labels=["engine", "tier"])
        for tier, n in use.nbytes.items():
            nbytes.add_metric([*engine, tier], n)
        yield nbytes
        for name, n in (("texts", use.texts), ("sessions", use.sessions)):
            gauge = GaugeMetricFamily(f"ragfuse_tenant_{name}", f"The tenant's {name}.", labels=["engine"])
            gauge.add_metric(engine, n)
            yield gauge
        limits = GaugeMetricFamily(
            "ragfuse_tenant_quota", "The tenant's quota; bytes in each tier.", labels=["engine", "kind"]
        )
        evictions = CounterMetricFamily(
            "ragfuse_tenant_evictions", "Entries, texts and sessions deleted for it.", labels=["engine", "kind"]
        )
        for kind, limit in self._keeper.limits().items():
            limits.add_metric([*engine, kind], limit)
        for kind in ("bytes", "texts", "sessions"):
            evictions.add_metric([*engine, kind], self._keeper.evicted[kind])
        yield from (limits, evictions)


def store_of(engine: Engine) -> dict[str, Any]:
    """Return the body of `/v1/ragfuse/store`: a tenant's entries by tier, and the tokens that its engine counted."""
    by_tier: dict[str, Counter[str]] = {tier.name: Counter() for tier in engine.store.tiers}
    for entry in engine.store.entries():
        if entry.key.model == engine.digest:
            by_tier[entry.tier].update(entries=1, nbytes=entry.nbytes, n_tokens=entry.n_tokens, pinned=entry.pinned)
    tiers = [
        {
            "name": tier.name,
            **{name: by_tier[tier.name][name] for name in ("entries", "nbytes", "n_tokens", "pinned")},
            "capacity": tier.capacity,
        }
        for tier in engine.store.tiers
    ]
    counted = engine.counters.now().sums
    tokens = {name: counted[name] for name in ("reused", "recomputed", "fresh", "written")}
    return {
        "object": "ragfuse.store",
        "tiers": tiers,
        "tokens": tokens,
        "waiting_to_be_encoded": engine.counters.waiting,
    }
