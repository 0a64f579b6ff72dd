"""The loads of one step, sent from the scheduler to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ragfuse.transfer import TransferHandle


@dataclass(frozen=True)
class Load:
    """The tokens of one request whose KV is to be loaded.

    Args:
        request: Id of the request.
        handle: The handle of the request's KV.
        lo: Index of the first token in the prompt.
        hi: One past the last token's index.
        blocks: The request's blocks of vLLM's cache, from the prompt's first token on.
    """

    request: str
    handle: TransferHandle
    lo: int
    hi: int
    blocks: tuple[int, ...]


@dataclass
class Loads(KVConnectorMetadata):
    """All loads of one step."""

    loads: tuple[Load, ...] = ()
