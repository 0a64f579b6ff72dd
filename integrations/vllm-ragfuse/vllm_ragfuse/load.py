"""The loads of one step, sent from the scheduler to the workers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ragfuse.transfer import TransferHandle


@dataclass(frozen=True)
class Load:
    """The rows of one request whose KV is to be loaded.

    Args:
        request: Id of the request.
        handle: The handle of its KV.
        lo: The first row.
        hi: One past the last row.
        blocks: The request's blocks, from its row 0 on.
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
