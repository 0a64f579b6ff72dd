"""What any LlamaIndex LLM must hold to, as tests to inherit: the framework has no such suite of its own."""

from llama_index_llm_conformance.events import Called
from llama_index_llm_conformance.suite import CALLS, SMALL, LLMConformance

__all__ = ["CALLS", "SMALL", "Called", "LLMConformance"]
