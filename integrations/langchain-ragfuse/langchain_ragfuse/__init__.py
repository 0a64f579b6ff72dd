"""LangChain integration of ragfuse: local models that reuse the KV of retrieved chunks."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from langchain_ragfuse.chat_models import ChatRagFuse
    from langchain_ragfuse.documents import RagFuseIndexer
    from langchain_ragfuse.llms import RagFuseLLM
    from langchain_ragfuse.prompts import PMLPromptTemplate
    from langchain_ragfuse.retrievers import RagFuseRetriever

__all__ = [
    "ChatRagFuse",
    "PMLPromptTemplate",
    "RagFuseIndexer",
    "RagFuseLLM",
    "RagFuseRetriever",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "chat_models": ["ChatRagFuse"],
        "documents": ["RagFuseIndexer"],
        "llms": ["RagFuseLLM"],
        "prompts": ["PMLPromptTemplate"],
        "retrievers": ["RagFuseRetriever"],
    },
)
"""Import each public name on first use. Importing the package loads no torch or LangChain."""
