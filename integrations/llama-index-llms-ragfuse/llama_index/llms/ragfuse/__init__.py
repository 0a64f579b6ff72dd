"""LlamaIndex over ragfuse: an LLM whose retrieved nodes come from a KV store."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from llama_index.llms.ragfuse.base import RagFuseLLM
    from llama_index.llms.ragfuse.listening import traces
    from llama_index.llms.ragfuse.precompute import KVPrecompute
    from llama_index.llms.ragfuse.prompts import PMLPromptTemplate
    from llama_index.llms.ragfuse.synthesizer import RagFuseSynthesizer

__all__ = ["KVPrecompute", "PMLPromptTemplate", "RagFuseLLM", "RagFuseSynthesizer", "traces"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["RagFuseLLM"],
        "listening": ["traces"],
        "precompute": ["KVPrecompute"],
        "prompts": ["PMLPromptTemplate"],
        "synthesizer": ["RagFuseSynthesizer"],
    },
)
"""Each public name is imported at its first use: importing the package alone loads neither torch nor frameworks."""
