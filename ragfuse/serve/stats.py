"""Prometheus metrics of a server's requests and of each tenant's engine, and a summary of a tenant's store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ragfuse.admin.quotas import QuotaKeeper
from ragfuse.engine.engine import Engine
from ragfuse.telemetry.prometheus import metrics

SCHEMAS = "/v1/ragfuse/schemas"
FAMILIES = (SCHEMAS, "/v1/ragfuse/documents", "/v1/ragfuse/entries", "/v1/ragfuse/sessions", "/v1/responses")
"""Paths whose longer forms, of single schemas and the like, are counted with them."""
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/ragfuse/store",
    "/v1/ragfuse/explain",
    "/v1/ragfuse/usage",
    *FAMILIES,
    "/health",
    "/metrics",
)
"""Paths that are counted by name; all others are counted together as "other"."""


class HasQueue(Protocol):
    """An object that knows how many requests wait and run."""

    @property
    def jobs(self) -> Any:
        """A queue: its length is the number of waiting requests, `running` the number of running ones."""
        ...


class ServerCounts:
    """The metrics of a server: requests by path and status, waiting and running requests, and each tenant's engine.

    A tenant sees the metrics of its own engine only. Thread-safe.
    """

    def __init__(self, admission: HasQueue) -> None:
        from prometheus_client import CollectorRegistry

        self._registry, self._tenant_registries = CollectorRegistry(), dict[str, CollectorRegistry]()
        self._admission, self._lock = admission, threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._registry.register(self)

    def count(self, path: str, status: int) -> None:
        """Count one request."""
        with self._lock:
            self._counts[_path_label(path), str(status)] += 1

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
        jobs = self._admission.jobs
        yield GaugeMetricFamily("ragfuse_requests_waiting", "Requests that wait for their turn.", value=len(jobs))
        yield GaugeMetricFamily("ragfuse_requests_running", "Requests that are being answered.", value=jobs.running)


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


def _path_label(path: str) -> str:
    """Return the path to count a request under; paths of single schemas and the like count as their family."""
    path = next((family for family in FAMILIES if path.startswith(f"{family}/")), path)
    return path if path in PATHS else "other"


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
