"""What the server counts: requests, and what each tenant's engine counts."""

from __future__ import annotations

from ragfuse.engine.engine import Engine
from ragfuse.serve.request_queue import RequestQueue
from ragfuse.telemetry.prometheus import metrics


class ServerMetrics:
    """The metrics of a server. A tenant sees those of its own engine only. Thread-safe.

    Args:
        queue: The requests that wait and run.
    """

    def __init__(self, queue: RequestQueue) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self._registry, self._tenants = CollectorRegistry(), dict[str, CollectorRegistry]()
        self._requests = Counter(
            "ragfuse_requests",
            "Requests, by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        for name, help_text, count in (
            ("waiting", "Requests that wait for their turn.", lambda: len(queue)),
            ("running", "Requests that are being answered.", lambda: len(queue.running)),
        ):
            gauge = Gauge(f"ragfuse_requests_{name}", help_text, registry=self._registry)
            gauge.set_function(count)

    def count(self, path: str, status: int) -> None:
        """Count one request by the path of its route, such as "/v1/ragfuse/schemas/{name}"."""
        self._requests.labels(path, str(status)).inc()

    def show(self, engine: Engine, salt: str, name: str, shares: bool) -> None:
        """Add the metrics of a tenant's engine, visible to that tenant until the engine is closed.

        Args:
            engine: The tenant's engine.
            salt: The tenant's salt.
            name: Value of the label "engine".
            shares: Whether other tenants use the same slow tiers, whose totals are then not shown.
        """
        from prometheus_client import CollectorRegistry

        self._tenants[salt] = CollectorRegistry()
        metrics(engine, self._tenants[salt], name, shares)

    def text(self, salt: str) -> bytes:
        """Return the metrics that the tenant of this salt may see, in Prometheus' text format."""
        from prometheus_client import generate_latest

        own = self._tenants.get(salt)
        return generate_latest(self._registry) + (generate_latest(own) if own is not None else b"")
