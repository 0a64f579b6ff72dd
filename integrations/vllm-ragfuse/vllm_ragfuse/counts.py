"""Counters of transferred prompts, for vLLM's log and Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

NAMES = MappingProxyType(
    {
        "prompts_loaded": "Requests whose prompt's KV came from ragfuse.",
        "prompts_recomputed": "Requests with a handle whose prompt vLLM computed itself.",
        "loaded_bytes": "Bytes of KV that workers loaded, as encoded.",
        "load_seconds": "Seconds that workers took to load KV.",
    }
)
"""The help text of each Prometheus counter, by the counter's name."""


@dataclass
class TransferCounts(KVConnectorStats):
    """The values of the counters in `NAMES`, by name, since the previous `take`."""

    def add(self, name: str, n: float = 1) -> None:
        """Add `n` to the counter `name`."""
        self.data[name] = self.data.get(name, 0) + n

    def take(self) -> TransferCounts | None:
        """Return the counters, and reset them to zero. Return None if all are zero."""
        if self.is_empty():
            return None
        taken = TransferCounts(dict(self.data))
        self.reset()
        return taken

    def reset(self) -> None:
        """Reset all counters to zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of another rank or step to these counters."""
        for name, n in other.data.items():
            self.add(name, n)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the rounded counters, for vLLM's log."""
        return {name: round(n, 3) for name, n in self.data.items()}

    def is_empty(self) -> bool:
        """Return True if all counters are zero."""
        return not self.data


class TransferMetrics(KVConnectorPromMetrics):
    """The Prometheus counters `vllm:ragfuse_*`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:ragfuse_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counter values by name to the Prometheus counters of the engine `engine_idx`."""
        for name, n in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(n)
