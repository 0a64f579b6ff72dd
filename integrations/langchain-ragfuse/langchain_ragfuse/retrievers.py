"""A retriever that prefetches the KV of retrieved documents while the chain builds the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field

from langchain_ragfuse.documents import PAGE, text_of, unbound
from ragfuse.adapters import engine_of
from ragfuse.types.arguments import checks_arguments


@checks_arguments
class RagFuseRetriever(BaseRetriever):
    """Wraps a retriever, and starts to copy the stored KV of the found documents to memory.

    The documents are returned unchanged, and need no indexing. A document without stored KV is
    encoded after the answer.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: Runnable[str, list[Document]]
    llm: Any = Field(repr=False)
    """The ChatRagFuse or RagFuseLLM that answers, also with bound arguments, or an engine."""
    document_prompt: BasePromptTemplate[str] = PAGE
    """The chain's prompt template for a single document."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        self._prefetch(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        found = await self.retriever.ainvoke(
            query, {"callbacks": run_manager.get_child()}, **kwargs
        )
        await asyncio.to_thread(self._prefetch, found)
        return found

    def _prefetch(self, documents: Iterable[Document]) -> None:
        engine = engine_of(unbound(self.llm))
        texts = [text_of(document, self.document_prompt) for document in documents]
        engine.know(texts)
        engine.prefetch([text for text, _ in texts])
