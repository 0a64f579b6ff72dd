"""RagFuseRetriever: the inner retriever's documents as they are, and their KV on its way to
memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer, RagFuseRetriever

from integrations.tests.kit import LETTERS
from ragfuse import Engine, InputError, Settings

DOCUMENTS = [
    Document(text, metadata={"source": text.split(".")[0]}) for text in LETTERS.split("\n\n")
]
PROMPT = ChatPromptTemplate.from_messages([("user", "{context}\n\nQuestion: {input}")])


class Fixed(BaseRetriever):
    """All documents, or the error that the query names."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, limit: int = 9
    ) -> list[Document]:
        if query == "fail":
            raise ValueError("The index is gone.")
        return DOCUMENTS[:limit]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, limit: int = 9
    ) -> list[Document]:
        return self._get_relevant_documents(query, run_manager=run_manager, limit=limit)


@pytest.fixture
def indexed(tiny_settings: Settings) -> Settings:
    """A store on disk that holds the documents' KV."""
    with Engine(tiny_settings) as engine:
        RagFuseIndexer(engine).index(DOCUMENTS)
    return tiny_settings


async def test_documents_come_as_they_are(engine: Engine) -> None:
    wrapped = RagFuseRetriever(retriever=Fixed(), llm=ChatRagFuse(engine=engine))
    assert wrapped.invoke("ships") == DOCUMENTS
    assert await wrapped.ainvoke("ships") == DOCUMENTS
    assert wrapped.batch(["ships", "trees"]) == [DOCUMENTS, DOCUMENTS]
    assert wrapped.invoke("ships", limit=2) == DOCUMENTS[:2]
    assert await wrapped.ainvoke("ships", limit=2) == DOCUMENTS[:2]


async def test_their_kv_is_brought_to_memory_while_the_prompt_is_built(indexed: Settings) -> None:
    with Engine(indexed) as engine:
        llm = ChatRagFuse(engine=engine)
        assert _in_memory(engine) == 0
        found = RagFuseRetriever(retriever=Fixed(), llm=llm.bind(ratio=0.5)).invoke("ships")
        engine.flush()
        assert _in_memory(engine) >= len(found)
    with Engine(indexed) as engine:
        found = await RagFuseRetriever(retriever=Fixed(), llm=engine).ainvoke("ships")
        engine.flush()
        assert _in_memory(engine) >= len(found)


def test_a_model_without_a_store_is_refused() -> None:
    with pytest.raises(InputError, match="Wanted an Engine"):
        RagFuseRetriever(retriever=Fixed(), llm=PROMPT).invoke("ships")


def _in_memory(engine: Engine) -> int:
    return sum(entry.tier == "memory" for entry in engine.store.entries())
