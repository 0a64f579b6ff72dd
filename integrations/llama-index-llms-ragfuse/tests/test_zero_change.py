"""Nothing changed but the LLM: LlamaIndex packs, strips and words the nodes, and their KV is found
all the same.

A real index with the embedded embedder; the LLM is tiny and random, so what is looked at is what it
reused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import BaseNode, NodeWithScore
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
MODES = [ResponseMode.COMPACT, ResponseMode.REFINE, ResponseMode.TREE_SUMMARIZE]


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


def names(nodes: list[NodeWithScore]) -> list[str]:
    return [each.node.metadata["file_name"] for each in nodes]


@pytest.mark.parametrize("mode", MODES)
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
                response = streaming.query(QUESTION)
                assert "".join(response.response_gen)
            else:
                response = (
                    engine.query(QUESTION) if way == "sync" else await engine.aquery(QUESTION)
                )
        found = names(response.source_nodes)
        assert len(found) == 3
        assert "1.txt" in found
        assert [hits(trace) for trace in seen] == (
            [[each] for each in found] if mode is MODES[1] else [found]
        ), way


class Prompts(BaseEventHandler):
    """Keeps the texts of chats that begin."""

    texts: list[str]

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatStartEvent):
            self.texts.append("\n".join(message.content or "" for message in event.messages))


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    handler, dispatcher = Prompts(texts=[]), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE])
def test_nodes_are_reused_whole_and_where_packing_cuts_them(
    llm: RagFuseLLM, nodes: list[BaseNode], prompts: Prompts, mode: ResponseMode
) -> None:
    """Several nodes become one text, which is cut where it is full: of what is cut in two both
    parts are reused.
    """
    helper = PromptHelper(context_window=420 if mode is MODES[2] else 860, num_output=12)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode, prompt_helper=helper)
    with traces() as seen:
        synthesizer.synthesize(QUESTION, [NodeWithScore(node=node) for node in nodes])
    whole = [
        [node.metadata["file_name"] for node in nodes if text_of(node)[0] in text]
        for text in prompts.texts
    ]
    found = [set(hits(trace)) for trace in seen]
    assert all(set(texts) <= sources for texts, sources in zip(whole, found, strict=True))
    assert set().union(*found) == {node.metadata["file_name"] for node in nodes}
    assert len(seen) > 1
    assert 2 <= sum(map(len, whole)) < len(nodes)


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
