"""Nothing changed but the LLM: LlamaIndex strips and words the nodes, and their KV is found all the
same.

A real index with the embedded embedder; the LLM is tiny and random, so what is looked at is what it
reused.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import BaseNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.llms.ragfuse import KVPrecompute, RagFuseLLM, traces
from llama_index.llms.ragfuse.convert import text_of

from integrations.tests.kit import LETTERS
from ragfuse import Engine, Trace

QUESTION = "What colour is the lighthouse painted?"
DOCUMENTS = [
    Document(
        text=f"\n {text} \n",
        id_=f"letter-{number}",
        metadata={"file_name": f"{number}.txt", "shelf": "north"},
    )
    for number, text in enumerate(LETTERS.split("\n\n"))
]


@pytest.fixture(scope="module")
def embedder(minilm: str) -> BaseEmbedding:
    return HuggingFaceEmbedding(model_name=minilm)


@pytest.fixture(scope="module")
def nodes(embedder: BaseEmbedding) -> list[BaseNode]:
    """One node of each document, embedded once for all tests."""
    found = list(
        SentenceSplitter(chunk_size=400, chunk_overlap=0).get_nodes_from_documents(DOCUMENTS)
    )
    for node in found:
        node.embedding = embedder.get_text_embedding(text_of(node)[0])
    assert len(found) == len(DOCUMENTS)
    return found


@pytest.fixture
def llm(engine: Engine, nodes: list[BaseNode]) -> RagFuseLLM:
    llm = RagFuseLLM(engine=engine)
    KVPrecompute(llm).ensure(nodes)
    return llm


@pytest.fixture
def index(nodes: list[BaseNode], embedder: BaseEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex([node.model_copy(deep=True) for node in nodes], embed_model=embedder)


def hits(trace: Trace) -> list[str]:
    """Where the chunks that came from the store are from; each chunk of the prompt did."""
    chunks = [segment for segment in trace.segments if segment.kind == "chunk"]
    assert all(segment.hit for segment in chunks)
    return [segment.source for segment in chunks]


@pytest.mark.parametrize(
    "mode", [ResponseMode.COMPACT, ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE]
)
async def test_query_engines_reuse_all_nodes_they_retrieve(
    index: VectorStoreIndex, llm: RagFuseLLM, mode: ResponseMode
) -> None:
    engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3)
    streaming = index.as_query_engine(
        llm=llm, response_mode=mode, similarity_top_k=3, streaming=True
    )
    for way in ("sync", "async", "stream"):
        with traces() as seen:
            if way == "stream":
                response: Any = streaming.query(QUESTION)
                assert "".join(response.response_gen)
            else:
                response = (
                    await engine.aquery(QUESTION) if way == "async" else engine.query(QUESTION)
                )
        found = [each.node.metadata["file_name"] for each in response.source_nodes]
        assert len(found) == 3
        assert "1.txt" in found
        each_alone = mode is ResponseMode.REFINE
        assert [hits(trace) for trace in seen] == (
            [[one] for one in found] if each_alone else [found]
        )


async def test_traces_are_those_of_ones_own_answers(llm: RagFuseLLM) -> None:
    """Nested listeners both hear; what other tasks ask is theirs alone; nothing is heard behind the
    `with`.
    """

    async def asked(times: int) -> int:
        with traces() as mine:
            for _ in range(times):
                await llm.acomplete("Hello there.")
            await asyncio.gather(llm.acomplete("Good morning."), llm.acomplete("Good night."))
        return len(mine)

    assert await asyncio.gather(asked(1), asked(2)) == [3, 4]
    with traces() as outer:
        with traces() as inner:
            llm.complete("Hello there.")
        list(llm.stream_complete("Hello again."))
    llm.complete("Hello at last.")
    assert (len(outer), len(inner)) == (2, 1)
    assert all(isinstance(trace, Trace) for trace in outer)
