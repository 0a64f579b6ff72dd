"""LangChain over ragfuse: a chat model whose retrieved chunks come from a KV store."""

from langchain_ragfuse.chains import create_fused_documents_chain
from langchain_ragfuse.chat_models import ChatRagFuse
from langchain_ragfuse.documents import RagFuseIndexer

__all__ = ["ChatRagFuse", "RagFuseIndexer", "create_fused_documents_chain"]
