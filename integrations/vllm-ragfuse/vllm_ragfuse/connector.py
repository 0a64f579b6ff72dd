"""`RagfuseConnector`, which vLLM loads by `kv_connector_module_path`: scheduler and worker side
behind vLLM's one interface.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_ragfuse.checks import Setup
from vllm_ragfuse.counts import TransferCounts, TransferMetrics
from vllm_ragfuse.load import Loads
from vllm_ragfuse.scheduler import SchedulerSide
from vllm_ragfuse.worker import WorkerSide


class RagfuseConnector(KVConnectorBase_V1):
    """Loads the KV of prompts fused by ragfuse; vLLM computes their last token and decodes.

    Args:
        vllm_config: vLLM's configuration.
        role: The side of this object, scheduler or worker.
        kv_cache_config: Configuration of vLLM's cache.

    Raises:
        SettingsError: The configuration does not allow the transfer.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        setup = Setup.of(vllm_config, kv_cache_config)
        is_worker = role is KVConnectorRole.WORKER
        self._worker = WorkerSide(setup, vllm_config) if is_worker else None
        self._scheduler = None if is_worker else SchedulerSide(setup)

    # the scheduler's side

    def on_new_request(self, request: Request) -> None:
        """Read the handle of the KV from a new request's parameters."""
        self._scheduler.begin(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens whose KV can be loaded, and whether between steps."""
        return self._scheduler.n_external(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Schedule the load of the tokens for which blocks were allocated."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the loads of this step."""
        return self._scheduler.take_loads()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the loads that failed in the workers."""
        self._scheduler.note(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Delete the KV of a finished request."""
        return False, self._scheduler.end(request)

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep references to vLLM's caches, by layer name."""
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of this step."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        self._worker.start(loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request takes part in a step only after its KV is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: this engine does not send KV."""

    def wait_for_save(self) -> None:
        """Do nothing: this engine does not send KV."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the finished loads, and which of them failed."""
        return self._worker.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load failed."""
        return self._worker.take_bad_blocks()

    # both sides

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        return (self._worker or self._scheduler).take_counts()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return the counters that vLLM logs, from `data`."""
        return TransferCounts(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> KVConnectorPromMetrics:
        """Return the Prometheus counters."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop threads and close the transfer place."""
        (self._worker or self._scheduler).close()
