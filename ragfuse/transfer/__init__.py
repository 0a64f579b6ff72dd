"""KV of whole prompts on its way to another engine: handles, and the places that both engines
reach.
"""

from ragfuse.errors import TransferError
from ragfuse.transfer.handle import TransferHandle, TransferModel
from ragfuse.transfer.place import TransferPlace
from ragfuse.transfer.weights import UNKNOWN, sample_weights

__all__ = [
    "UNKNOWN",
    "TransferError",
    "TransferHandle",
    "TransferModel",
    "TransferPlace",
    "sample_weights",
]
