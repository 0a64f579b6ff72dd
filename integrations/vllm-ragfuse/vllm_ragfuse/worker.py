"""The connector's worker side, which copies KV layer by layer into vLLM's paged cache.

The cache's layout depends on the attention backend. Therefore KV is written by the method that
vLLM's own forward pass uses (`do_kv_cache_update`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from ragfuse import SettingsError
from ragfuse.transfer import TransferError
from vllm_ragfuse.checks import Setup
from vllm_ragfuse.counts import TransferCounts
from vllm_ragfuse.load import Load, Loads
from vllm_ragfuse.rows import heads_of_rank, slots_of

logger = init_logger("vllm.ragfuse")


class WorkerSide:
    """Loads KV into the paged cache of one rank.

    An asynchronous load happens between steps, in a thread. A synchronous load happens in `start`,
    before the step.
    """

    def __init__(self, setup: Setup, config: VllmConfig) -> None:
        self._setup, self._config, self._place = setup, config, setup.place()
        self._caches: Mapping[str, Tensor] = {}
        self._layers: dict[str, Attention] = {}
        self._heads = slice(None)
        self._stream: torch.cuda.Stream | None = None
        self._running: dict[str, tuple[Load, Future[None]]] = {}
        self._used: dict[str, Load] = {}
        self._bad_blocks: set[int] = set()
        self._counts = TransferCounts()
        self._pool = ThreadPoolExecutor(1, "ragfuse-transfer")

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """Store references to vLLM's cache tensors, by layer name.

        Raises:
            SettingsError: A layer's attention backend is not supported.
        """
        layers = get_layers_from_vllm_config(self._config, Attention, list(caches))
        for name, layer in layers.items():
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise SettingsError(
                    "The attention backend must have do_kv_cache_update, found"
                    f" {type(layer.impl).__name__} in {name}. Choose another backend with"
                    " --attention-backend."
                )
        self._caches, self._layers = (
            caches,
            dict(sorted(layers.items(), key=lambda each: extract_layer_index(each[0]))),
        )
        rank, n_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self._heads = heads_of_rank(self._setup.model.kv_heads, rank, n_ranks)
        device = next(iter(caches.values())).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, loads: Loads) -> None:
        """Start the KV loads of a step. Synchronous loads are finished when `start` returns."""
        for load in loads.loads:
            self._used[load.request] = load
            if self._setup.is_async:
                self._running[load.request] = load, self._pool.submit(self._load, load)
                continue
            try:
                self._load(load)
            except Exception as error:
                self._warn(load, error)
                self._bad_blocks.update(load.blocks[load.lo // self._setup.block_size :])

    def results(self, finished: set[str]) -> KVConnectorTransferResults:
        """Return the asynchronous loads that ended since the previous call, and those that failed.

        Args:
            finished: Ids of the requests that have ended. Their KV is deleted.
        """
        done = {name for name, (_, future) in self._running.items() if future.done()}
        failed = set()
        for name in done:
            load, future = self._running.pop(name)
            error = future.exception()
            if error is not None:
                failed.add(name)
                self._warn(load, error)
        for name in finished & set(self._used):
            # Also closes the file from which the KV was read.
            self._pool.submit(self._place.delete, self._used.pop(name).handle)
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def take_bad_blocks(self) -> set[int]:
        """Return the cache blocks whose synchronous load failed since the previous call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_counts(self) -> TransferCounts | None:
        """Return the counters since the previous call, or None if all are zero."""
        return self._counts.take()

    def close(self) -> None:
        """Stop the loading thread and close the transfer place."""
        self._pool.shutdown(cancel_futures=True)
        self._place.close()

    @torch.inference_mode()
    def _load(self, load: Load) -> None:
        """Write the KV of one request into the cache; TransferError if the KV cannot be read."""
        start_s = time.perf_counter()
        device = next(iter(self._caches.values())).device
        with self._own_stream():
            slots = slots_of(load.blocks, self._setup.block_size, load.lo, load.hi).to(device)
            for (name, layer), kv in zip(
                self._layers.items(), self._place.read(load.handle), strict=True
            ):
                keys, values = (
                    part[self._heads, load.lo : load.hi].transpose(0, 1).contiguous().to(device)
                    for part in (kv.keys, kv.values)
                )
                layer.impl.do_kv_cache_update(layer, keys, values, self._caches[name], slots)
        self._counts.add("loaded_bytes", load.handle.nbytes)
        self._counts.add("load_seconds", time.perf_counter() - start_s)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a GPU, execute the block on a separate CUDA stream. Wait for the stream at exit."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _warn(self, load: Load, error: BaseException) -> None:
        unexpected = None if isinstance(error, TransferError) else error
        logger.warning(
            "ragfuse: the KV of request %s could not be loaded: %s",
            load.request,
            error,
            exc_info=unexpected,
        )
