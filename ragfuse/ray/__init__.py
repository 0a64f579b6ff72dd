"""Ray spreads the work over machines: bulk encoding by Ray Data, serving by Ray Serve.

Imports of `ray` are absolute and stand in functions, or in modules that only Ray loads.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from ragfuse.ray.bulk import BulkSummary, encode

__all__ = ["BulkSummary", "encode"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__, submod_attrs={"bulk": ["BulkSummary", "encode"]}
)
