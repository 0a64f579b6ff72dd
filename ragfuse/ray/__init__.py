"""Encode and serve on a Ray cluster. Importing this package does not import Ray."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from ragfuse.ray.bulk import BulkSummary, encode

__all__ = ["BulkSummary", "encode"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__, submod_attrs={"bulk": ["BulkSummary", "encode"]}
)
