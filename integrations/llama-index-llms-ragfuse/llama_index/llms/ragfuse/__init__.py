"""LlamaIndex over ragfuse: an LLM whose retrieved nodes come from a KV store."""
