"""What the server counts: requests, and each tenant's engine and quota."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragfuse.engine.engine import Engine
from ragfuse.serve.admission import AdmissionControl
from ragfuse.serve.quotas import QuotaKeeper
from ragfuse.telemetry.prometheus import metrics


class ServerMetrics:
    """The metrics of a server. A tenant sees those of its own engine only. Thread-safe.

    Args:
        admission: Whose requests wait and run.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._registry, self._tenants = CollectorRegistry(), dict[str, CollectorRegistry]()
        labels = ("path", "status")
        self._requests = Counter(
            "ragfuse_requests", "Requests, by path and status.", labels, registry=self._registry
        )
        waiting = Gauge(
            "ragfuse_requests_waiting",
            "Requests that wait for their turn.",
            registry=self._registry,
        )
        waiting.set_function(lambda: len(admission.jobs))
        running = Gauge(
            "ragfuse_requests_running", "Requests that are being answered.", registry=self._registry
        )
        running.set_function(lambda: len(admission.jobs.running))

    def count(self, path: str, status: int) -> None:
        """Count one request by the path of its route, such as "/v1/ragfuse/schemas/{name}"."""
        self._requests.labels(path, str(status)).inc()

    def show(self, engine: Engine, salt: str, name: str, keeper: QuotaKeeper, shares: bool) -> None:
        """Add the metrics of a tenant's engine and of its quota, visible to that tenant until the
        engine is closed.

        Args:
            engine: The tenant's engine.
            salt: The tenant's salt.
            name: Value of the label "engine".
            keeper: Keeps the tenant within its quota.
            shares: Whether other tenants use the same slow tiers, whose totals are then not shown.
        """
        from prometheus_client import CollectorRegistry

        registry = self._tenants[salt] = CollectorRegistry()
        metrics(engine, registry, name, shares)
        registry.register(_QuotaMetrics(keeper, name))

    def text(self, salt: str) -> bytes:
        """Return the metrics that the tenant of this salt may see, in Prometheus' text format."""
        from prometheus_client import generate_latest

        own = self._tenants.get(salt)
        return generate_latest(self._registry) + (generate_latest(own) if own is not None else b"")


class _QuotaMetrics:
    """The metrics of a tenant's quota: its use as last counted, its limits, its evictions."""

    def __init__(self, keeper: QuotaKeeper, name: str) -> None:
        self._keeper, self._name = keeper, name

    def collect(self) -> Iterator[Any]:
        """Yield the metric families with their current values."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        keeper = self._keeper
        for family, name, text, label, values in (
            (GaugeMetricFamily, "bytes", "Bytes of the tenant's KV.", ["tier"], keeper.use.nbytes),
            (GaugeMetricFamily, "texts", "The tenant's texts.", [], {"": keeper.use.texts}),
            (
                GaugeMetricFamily,
                "sessions",
                "The tenant's sessions.",
                [],
                {"": keeper.use.sessions},
            ),
            (
                GaugeMetricFamily,
                "quota",
                "The tenant's quota; bytes in each tier.",
                ["kind"],
                keeper.limits(),
            ),
            (
                CounterMetricFamily,
                "evictions",
                "Entries, texts and sessions deleted for it.",
                ["kind"],
                keeper.evicted,
            ),
        ):
            metric = family(f"ragfuse_tenant_{name}", text, labels=["engine", *label])
            for of, n in values.items():
                metric.add_metric([self._name, of][: len(label) + 1], n)
            yield metric
