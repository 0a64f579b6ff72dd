"""What a server counts of its requests, for Prometheus, beside what its engines count; what a tenant's store holds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ragfuse.admin.quotas import QuotaKeeper
from ragfuse.engine.engine import Engine
from ragfuse.telemetry.prometheus import metrics

SCHEMAS = "/v1/ragfuse/schemas"
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/ragfuse/store",
    "/v1/ragfuse/explain",
    SCHEMAS,
    "/health",
    "/metrics",
)
"""Paths that are counted by their name; all others together."""


class Queued(Protocol):
    """Who waits and who is answered."""

    @property
    def jobs(self) -> Any:
        """A queue with a length and `running`."""
        ...


class ServerCounts:
    """Requests by path and status, how many wait and are answered, and each tenant's engine's own counts, which nobody
    else is told. Thread-safe."""

    def __init__(self, turnstile: Queued) -> None:
        from prometheus_client import CollectorRegistry

        self._registry, self._own = CollectorRegistry(), dict[str, CollectorRegistry]()
        self._turnstile, self._lock = turnstile, threading.Lock()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._registry.register(self)

    def asked(self, path: str, status: int) -> None:
        """One request more."""
        with self._lock:
            self._asked[_counted(path), str(status)] += 1

    def show(self, engine: Engine, salt: str, name: str, keeper: QuotaKeeper, shares: bool = False) -> None:
        """Show an engine's counts, and what its tenant keeps, under this name to the tenant of this salt, until it is
        closed. shares: with other tenants of this server."""
        from prometheus_client import CollectorRegistry

        with self._lock:
            registry = self._own.setdefault(salt, CollectorRegistry())
        metrics(engine, registry, name, shares)
        registry.register(_OfTenant(keeper, name))

    def text(self, salt: str) -> bytes:
        """What the tenant of this salt may know, as Prometheus reads it."""
        from prometheus_client import generate_latest

        with self._lock:
            own = self._own.get(salt)
        return generate_latest(self._registry) + (generate_latest(own) if own is not None else b"")

    def describe(self) -> Iterable[Any]:
        """What will come."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """Everything, as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            asked = dict(self._asked)
        requests = CounterMetricFamily("ragfuse_requests", "Requests, by path and status.", labels=["path", "status"])
        for labels, n in asked.items():
            requests.add_metric(labels, n)
        yield requests
        jobs = self._turnstile.jobs
        yield GaugeMetricFamily("ragfuse_requests_waiting", "Requests that wait for their turn.", value=len(jobs))
        yield GaugeMetricFamily("ragfuse_requests_running", "Requests that are being answered.", value=jobs.running)


class _OfTenant:
    """What a tenant keeps, as it was counted last, and what it may keep."""

    def __init__(self, keeper: QuotaKeeper, name: str) -> None:
        self._keeper, self._name = keeper, name

    def describe(self) -> Iterable[Any]:
        """What will come."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """Everything, as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        use, engine = self._keeper.use, [self._name]
        nbytes = GaugeMetricFamily("ragfuse_tenant_bytes", "Bytes of the tenant's KV.", labels=["engine", "tier"])
        for tier, n in use.nbytes.items():
            nbytes.add_metric([*engine, tier], n)
        yield nbytes
        for what, n in (("texts", use.texts), ("sessions", use.sessions)):
            gauge = GaugeMetricFamily(f"ragfuse_tenant_{what}", f"The tenant's {what}.", labels=["engine"])
            gauge.add_metric(engine, n)
            yield gauge
        limits = GaugeMetricFamily(
            "ragfuse_tenant_quota", "What it may keep; bytes in each tier.", labels=["engine", "kind"]
        )
        gone = CounterMetricFamily(
            "ragfuse_tenant_evictions", "Entries, texts and sessions dropped for it.", labels=["engine", "kind"]
        )
        for kind, most in self._keeper.limits().items():
            limits.add_metric([*engine, kind], most)
        for kind in ("bytes", "texts", "sessions"):
            gone.add_metric([*engine, kind], self._keeper.evicted[kind])
        yield from (limits, gone)


def _counted(path: str) -> str:
    """The path that a request is counted under: that of one schema as that of all."""
    path = SCHEMAS if path.startswith(f"{SCHEMAS}/") else path
    return path if path in PATHS else "other"


def store_of(engine: Engine) -> dict[str, Any]:
    """What one tenant's entries come to, by tier, and what its engine met; nothing of other tenants."""
    mine: dict[str, Counter[str]] = {tier.name: Counter() for tier in engine.store.tiers}
    for entry in engine.store.entries():
        if entry.key.model == engine.digest:
            mine[entry.tier].update(entries=1, nbytes=entry.nbytes, n_tokens=entry.n_tokens, pinned=entry.pinned)
    tiers = [
        {
            "name": tier.name,
            **{name: mine[tier.name][name] for name in ("entries", "nbytes", "n_tokens", "pinned")},
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
