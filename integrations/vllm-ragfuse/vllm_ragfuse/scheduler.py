"""The connector's scheduler side, which finds requests with transferred KV and tracks KV loads.

The scheduler side reads no KV and never waits for the transfer place. If a worker cannot load the
KV of a prompt, vLLM computes the prompt.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ragfuse.transfer import TransferError, TransferHandle
from vllm_ragfuse.checks import Setup
from vllm_ragfuse.counts import TransferCounts
from vllm_ragfuse.load import Load, Loads

logger = init_logger("vllm.ragfuse")

PARAMS = "ragfuse"
"""Key of the handle in a request's `kv_transfer_params`."""


class SchedulerSide:
    """Tells vLLM's scheduler which KV can be loaded, and deletes the KV of ended requests.

    KV is not deleted before the request ends, because a preempted request loads its KV again.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._place = setup, setup.place()
        self._tenant = TransferHandle.tenant_label(setup.salt) if setup.salt is not None else None
        self._handles: dict[str, TransferHandle] = {}  # by request id
        self._loads: dict[str, Load] = {}  # the latest load, by request id
        # By request id: number of preemptions when a load was last offered to the scheduler.
        # A load is offered again only after a further preemption.
        self._offered: dict[str, int] = {}
        self._failures: dict[str, str] = {}  # by request id: why vLLM computes the prompt
        self._told = set[str]()  # requests whose failure was logged
        self._new: list[Load] = []
        self._counts = TransferCounts()
        self._pool = ThreadPoolExecutor(1, "ragfuse-transfer")

    def begin(self, request: Request) -> None:
        """Check a new request's handle, and hide the KV from other requests' prefix lookups."""
        told = (request.kv_transfer_params or {}).get(PARAMS)
        if told is None:
            return
        try:
            handle = self._checked(told, request)
        # Logged when the request is scheduled, because vLLM also begins requests that it rejects.
        except TransferError as error:
            self._failures[request.request_id] = str(error)
            return
        self._handles[request.request_id] = handle
        request.cache_salt = (  # unique per request, because a handle may be sent again
            f"ragfuse-{secrets.token_hex(16)}"
        )
        request.block_hashes.clear()
        request.update_block_hashes()

    def n_external(self, request: Request, n_computed: int) -> tuple[int, bool]:
        """Return the number of tokens whose KV can be loaded, and True if the load is async.

        The first `n_computed` tokens of the prompt are already computed. vLLM always computes the
        prompt's final token, whose logits give the first token of the answer.
        """
        name = request.request_id
        if name in self._failures:
            self._tell(name)
            return 0, False
        if name not in self._handles:
            return 0, False
        # This load was already offered to the scheduler. A failed load is not retried.
        if self._offered.get(name) == request.num_preemptions:
            return 0, False
        n = request.num_prompt_tokens - 1 - n_computed
        return (n, self._setup.is_async) if n > 0 else (0, False)

    def allocated(self, request: Request, blocks: Sequence[int], n_external: int) -> None:
        """Schedule the load of the tokens for which blocks were allocated."""
        name = request.request_id
        if n_external <= 0 or name not in self._handles:
            return
        self._offered[name] = request.num_preemptions
        hi = request.num_prompt_tokens - 1
        load = Load(name, self._handles[name], hi - n_external, hi, tuple(blocks))
        self._loads[name] = load
        self._new.append(load)

    def take_loads(self) -> Loads:
        """Return the loads that were scheduled since the previous call."""
        loads, self._new = tuple(self._new), []
        return Loads(loads)

    def note(self, output: KVConnectorOutput) -> None:
        """Record the KV loads that failed in the workers."""
        failed = set(output.failed_recving)
        if output.invalid_block_ids:
            failed |= {
                name
                for name, load in self._loads.items()
                if output.invalid_block_ids & set(load.blocks)
            }
        for name in failed & set(self._handles):
            self._failures[name] = (
                "The KV could not be loaded; the log of the vLLM worker says why."
            )
            self._tell(name)

    def end(self, request: Request) -> dict[str, Any] | None:
        """Delete a finished request's KV, and return the outcome of the load for the response.

        Returns:
            {"ragfuse": {"loaded": True}}, or {"ragfuse": {"loaded": False, "why": reason}}. None
            if no load was offered and nothing failed.
        """
        name = request.request_id
        handle, failure = self._handles.pop(name, None), self._failures.pop(name, None)
        self._loads.pop(name, None)
        was_offered = self._offered.pop(name, None) is not None
        if handle is not None:
            self._pool.submit(self._delete, handle)
        if failure is not None:
            if name in self._told:
                self._told.remove(name)
                self._counts.add("prompts_recomputed")
            return {PARAMS: {"loaded": False, "why": failure}}
        if was_offered:
            self._counts.add("prompts_loaded")
            return {PARAMS: {"loaded": True}}
        return None

    def take_counts(self) -> TransferCounts | None:
        """Return the counters since the previous call, or None if all are zero."""
        return self._counts.take()

    def close(self) -> None:
        """Finish pending deletions and close the transfer place."""
        self._pool.shutdown()
        self._place.close()

    def _checked(self, told: object, request: Request) -> TransferHandle:
        """Return a request's handle; TransferError if the KV cannot be used for the request."""
        handle = TransferHandle.from_dict(told)
        if (
            request.prompt_token_ids is None
            or request.mm_features
            or request.lora_request is not None
        ):
            raise TransferError(
                "KV can be loaded only for a prompt of token ids, but this prompt has embeddings,"
                " media or an adapter. Send the request without kv_transfer_params."
            )
        if self._tenant is not None and handle.tenant != self._tenant:
            raise TransferError(
                "The KV belongs to a tenant other than this engine's (option salt). Send the"
                " request to the engine of that tenant."
            )
        if any(handle.secret == other.secret for other in self._handles.values()):
            raise TransferError("Another request uses this KV handle. Run one prefill per request.")
        handle.check(request.prompt_token_ids, self._setup.model, time.time(), self._setup.weights)
        return handle

    def _tell(self, name: str) -> None:
        """Log, once per request, why vLLM computes the request's prompt."""
        if name not in self._told:
            self._told.add(name)
            logger.warning(
                "ragfuse: vLLM computes the prompt of request %s itself. %s",
                name,
                self._failures[name],
            )

    def _delete(self, handle: TransferHandle) -> None:
        try:
            self._place.delete(handle)
            self._place.sweep_if_due()
        except Exception:
            logger.warning(
                "ragfuse: the loaded KV could not be deleted; the KV stays until it expires.",
                exc_info=True,
            )
