"""LlamaIndex over ragfuse: an LLM whose retrieved nodes come from a KV store."""

from llama_index.llms.ragfuse.base import RagFuseLLM
from llama_index.llms.ragfuse.precompute import KVPrecompute
from llama_index.llms.ragfuse.synthesizer import RagFuseSynthesizer

__all__ = ["KVPrecompute", "RagFuseLLM", "RagFuseSynthesizer"]
