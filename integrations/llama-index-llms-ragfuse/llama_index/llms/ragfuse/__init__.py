"""LlamaIndex over ragfuse: an LLM whose retrieved nodes come from a KV store."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_index.llms.ragfuse.base import RagFuseLLM
    from llama_index.llms.ragfuse.listening import traces
    from llama_index.llms.ragfuse.precompute import KVPrecompute
    from llama_index.llms.ragfuse.prompts import PMLPromptTemplate
    from llama_index.llms.ragfuse.synthesizer import RagFuseSynthesizer

__all__ = ["KVPrecompute", "PMLPromptTemplate", "RagFuseLLM", "RagFuseSynthesizer", "traces"]

_HOMES = MappingProxyType(
    {
        "KVPrecompute": "precompute",
        "PMLPromptTemplate": "prompts",
        "RagFuseLLM": "base",
        "RagFuseSynthesizer": "synthesizer",
        "traces": "listening",
    }
)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: importing the package alone loads neither torch nor LlamaIndex."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
