"""LangChain over ragfuse: a chat model whose retrieved chunks come from a KV store."""
