"""`RagfuseConnector`, which vLLM loads by `kv_connector_module_path`. An object of the class is
either the scheduler's side or a worker's side of the connector.
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
    """A vLLM KV connector that loads the KV of prompts that ragfuse prefilled.

    vLLM computes only the final token of such a prompt, and decodes the answer.

    Args:
        vllm_config: vLLM's configuration.
        role: Scheduler or worker, the process in which vLLM creates this object.
        kv_cache_config: Configuration of vLLM's cache.

    Raises:
        SettingsError: KV cannot be transferred with this configuration.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        setup = Setup.of(vllm_config, kv_cache_config)
        is_worker = role is KVConnectorRole.WORKER
        self._worker = WorkerSide(setup, vllm_config) if is_worker else None
        self._scheduler = None if is_worker else SchedulerSide(setup)

    # methods that vLLM's scheduler calls

    def on_new_request(self, request: Request) -> None:
        """Read a new request's transfer handle from the request's `kv_transfer_params`."""
        self._scheduler.begin(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens whose KV can be loaded, and True if the load is async."""
        return self._scheduler.n_external(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Schedule the load of the tokens for which blocks were allocated."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the KV loads that the workers start in this step."""
        return self._scheduler.take_loads()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the KV loads that failed in the workers."""
        self._scheduler.note(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Delete a finished request's transferred KV. Return False and the outcome of the load.

        False means that vLLM frees the blocks now.
        """
        return False, self._scheduler.end(request)

    # methods that vLLM's workers call

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Store references to vLLM's cache tensors, by layer name."""
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the KV loads of this step."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        self._worker.start(loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request's KV is loaded before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: this engine does not send KV."""

    def wait_for_save(self) -> None:
        """Do nothing: this engine does not send KV."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose load finished, and those whose load failed."""
        return self._worker.results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the ids of the cache blocks whose load failed."""
        return self._worker.take_bad_blocks()

    # methods that both call

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the transfer counters since the previous call, or None if all are zero."""
        return (self._worker or self._scheduler).take_counts()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return the transfer counters in `data` as an object that vLLM can log."""
        return TransferCounts(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> KVConnectorPromMetrics:
        """Return the Prometheus metrics of the transfer counters."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop threads and close the transfer place."""
        (self._worker or self._scheduler).close()
