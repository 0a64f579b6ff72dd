"""LangChain over ragfuse: models whose retrieved chunks come from a KV store."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_ragfuse.chains import create_fused_documents_chain
    from langchain_ragfuse.chat_models import ChatRagFuse
    from langchain_ragfuse.documents import RagFuseIndexer
    from langchain_ragfuse.llms import RagFuseLLM
    from langchain_ragfuse.prompts import PMLPromptTemplate
    from langchain_ragfuse.retrievers import RagFuseRetriever
    from langchain_ragfuse.stores import RagFuseByteStore

__all__ = [
    "ChatRagFuse",
    "PMLPromptTemplate",
    "RagFuseByteStore",
    "RagFuseIndexer",
    "RagFuseLLM",
    "RagFuseRetriever",
    "create_fused_documents_chain",
]

_HOMES = MappingProxyType(
    {
        "ChatRagFuse": "chat_models",
        "PMLPromptTemplate": "prompts",
        "RagFuseByteStore": "stores",
        "RagFuseIndexer": "documents",
        "RagFuseLLM": "llms",
        "RagFuseRetriever": "retrievers",
        "create_fused_documents_chain": "chains",
    }
)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: importing the package alone loads neither torch nor LangChain."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    globals()[name] = found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
