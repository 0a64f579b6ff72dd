"""LlamaIndex integration of ragfuse: a local LLM that reuses the KV of retrieved nodes."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from llama_index.llms.ragfuse.base import RagFuseLLM
    from llama_index.llms.ragfuse.precompute import KVPrecompute
    from llama_index.llms.ragfuse.prompts import PMLPromptTemplate
    from llama_index.llms.ragfuse.synthesizer import RagFuseSynthesizer
    from llama_index.llms.ragfuse.trace_collector import traces

__all__ = ["KVPrecompute", "PMLPromptTemplate", "RagFuseLLM", "RagFuseSynthesizer", "traces"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base": ["RagFuseLLM"],
        "trace_collector": ["traces"],
        "precompute": ["KVPrecompute"],
        "prompts": ["PMLPromptTemplate"],
        "synthesizer": ["RagFuseSynthesizer"],
    },
)
"""Import each public name on first use. Importing the package loads no torch or LlamaIndex."""
