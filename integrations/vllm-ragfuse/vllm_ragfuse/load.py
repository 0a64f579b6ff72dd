"""The KV loads of one vLLM step, which the scheduler sends to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ragfuse.transfer import TransferHandle


@dataclass(frozen=True)
class Load:
    """A load of transferred KV into vLLM's cache, for the prompt tokens lo:hi of one request.

    Args:
        request: Id of the request.
        handle: The transfer handle, which says where the request's KV is.
        lo: Index in the prompt of the first token to load.
        hi: Index in the prompt after the final token to load.
        blocks: Ids of the request's blocks in vLLM's cache, beginning with the block of the
            prompt's first token.
    """

    request: str
    handle: TransferHandle
    lo: int
    hi: int
    blocks: tuple[int, ...]


@dataclass
class Loads(KVConnectorMetadata):
    """All KV loads of one step."""

    loads: tuple[Load, ...] = ()
