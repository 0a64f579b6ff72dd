"""A vLLM KV connector that writes the KV of prompts prefilled by ragfuse into vLLM's cache."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from vllm_ragfuse.connector import RagfuseConnector

__all__ = ["RagfuseConnector"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__, submod_attrs={"connector": ["RagfuseConnector"]}
)
