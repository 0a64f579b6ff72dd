"""LangChain over ragfuse: models whose retrieved chunks come from a KV store."""

from langchain_ragfuse.chains import create_fused_documents_chain
from langchain_ragfuse.chat_models import ChatRagFuse
from langchain_ragfuse.documents import RagFuseIndexer
from langchain_ragfuse.llms import RagFuseLLM
from langchain_ragfuse.retrievers import RagFuseRetriever
from langchain_ragfuse.stores import RagFuseByteStore

__all__ = [
    "ChatRagFuse",
    "RagFuseByteStore",
    "RagFuseIndexer",
    "RagFuseLLM",
    "RagFuseRetriever",
    "create_fused_documents_chain",
]
