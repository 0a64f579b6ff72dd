"""RagFuseRetriever: the inner retriever's documents as they are, and their KV on its way to
memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer, RagFuseRetriever

from integrations.tests.kit import LETTERS
from integrations.tests.served import KEY
from ragfuse import Engine, InputError, Settings
from tests.kits.serve import Served

DOCUMENTS = [
    Document(text, metadata={"source": text.split(".")[0]}) for text in LETTERS.split("\n\n")
]


class Fixed(BaseRetriever):
    """All documents."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, limit: int = 9
    ) -> list[Document]:
        return DOCUMENTS[:limit]


async def test_documents_come_as_they_are_and_their_kv_is_brought_to_memory(
    tiny_settings: Settings,
) -> None:
    with Engine(tiny_settings) as engine:
        RagFuseIndexer(engine).index(DOCUMENTS)
    with Engine(tiny_settings) as engine:
        llm = ChatRagFuse(engine=engine).bind(ratio=0.5)
        assert _in_memory(engine) == 0
        assert (
            RagFuseRetriever(retriever=Fixed(), llm=llm).invoke("ships", limit=2) == DOCUMENTS[:2]
        )
        engine.flush()
        assert 0 < _in_memory(engine) < len(DOCUMENTS)
        assert await RagFuseRetriever(retriever=Fixed(), llm=engine).ainvoke("ships") == DOCUMENTS
        engine.flush()
        assert _in_memory(engine) >= len(DOCUMENTS)


def test_with_a_server_a_retriever_is_as_it_was_and_an_indexer_wants_an_engine(
    served: Served,
) -> None:
    llm = ChatRagFuse(base_url=served.url, api_key=KEY)
    assert RagFuseRetriever(retriever=Fixed(), llm=llm).invoke("ships") == DOCUMENTS
    with pytest.raises(InputError, match="engine"):
        RagFuseIndexer(llm).index(DOCUMENTS)
    with pytest.raises(InputError, match="Engine"):
        RagFuseRetriever(retriever=Fixed(), llm="gpt").invoke("ships")


def _in_memory(engine: Engine) -> int:
    return sum(entry.tier == "memory" for entry in engine.store.entries())
