"""Tests that any LlamaIndex LLM must pass, as a class to inherit: the framework has no such suite of its own."""

from llama_index_llm_conformance.events import CallbackRecorder
from llama_index_llm_conformance.suite import CALLS, MAX_SETTINGS_BYTES, LLMConformance

__all__ = ["CALLS", "MAX_SETTINGS_BYTES", "CallbackRecorder", "LLMConformance"]
