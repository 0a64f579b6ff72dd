"""Transfer of whole prompts' KV to another engine: handles, and a tier that both engines reach."""

from ragfuse.errors import TransferError
from ragfuse.transfer.handle import UNKNOWN, TransferHandle, TransferModel, sample_weights
from ragfuse.transfer.place import TransferPlace

__all__ = [
    "UNKNOWN",
    "TransferError",
    "TransferHandle",
    "TransferModel",
    "TransferPlace",
    "sample_weights",
]
