"""What any retriever returned reaches the engine with the question: nothing is changed but the LLM.

The engine is tiny and random, and what it is asked is looked at, not what it answers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import RetrieverTool
from llama_index.llms.ragfuse import RagFuseLLM, RagFuseSynthesizer, events

from ragfuse import Ask, Engine

Heard = tuple[tuple[str, str], ...]
MODES = [
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.SIMPLE_SUMMARIZE,
]


class Shelf(BaseRetriever):
    """Returns two nodes that are named after the question."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return nodes(query_bundle.query_str.removeprefix("\ninput is ").strip())  # as a tool asks


def nodes(query: str) -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(
                text=f"\n The {query} letter {n}. \n", metadata={"file_name": f"{query}-{n}"}
            )
        )
        for n in (1, 2)
    ]


def texts(*queries: str) -> Heard:
    """What the engine is to hear of these questions' nodes: with their metadata, as synthesizers
    put them.
    """
    return tuple(
        (f"file_name: {query}-{n}\n\n\n The {query} letter {n}.", f"{query}-{n}")
        for query in queries
        for n in (1, 2)
    )


def bare(*queries: str) -> Heard:
    """The same without their metadata, as `get_content` gives them."""
    return tuple((f"The {query} letter {n}.", f"{query}-{n}") for query in queries for n in (1, 2))


def joined(found: list[NodeWithScore]) -> str:
    return "\n\n".join(each.get_content() for each in found)


@pytest.fixture
def llm(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine, max_tokens=4)


def over(retriever: BaseRetriever, llm: RagFuseLLM, **more: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(retriever, llm=llm, **more)


async def every_way(retriever: BaseRetriever, llm: RagFuseLLM, **more: Any) -> None:
    """Ask a query engine by each of LlamaIndex's calls."""
    engine, streaming = over(retriever, llm, **more), over(retriever, llm, streaming=True, **more)
    engine.query("harbour")
    await engine.aquery("harbour")
    response: Any = streaming.query("harbour")
    assert response.get_response().response
    response = await streaming.aquery("harbour")
    assert (await response.get_response()).response


@pytest.mark.parametrize("mode", MODES)
async def test_what_a_query_engine_retrieved_reaches_the_engine(
    llm: RagFuseLLM, asks: list[Ask], mode: ResponseMode
) -> None:
    await every_way(Shelf(), llm, response_mode=mode)
    assert len(asks) == (8 if mode is ResponseMode.REFINE else 4)
    told = texts("harbour")
    if mode is ResponseMode.SIMPLE_SUMMARIZE:  # which prints what it fills in
        told = tuple((text.replace("\n", "\\n"), source) for text, source in told)
    assert [ask.documents for ask in asks] == [told] * len(asks)
    assert len(events.QUERIES) == 0


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
async def test_nodes_of_chat_engines_reach_the_engine(
    llm: RagFuseLLM, asks: list[Ask], kind: Any
) -> None:
    """The first message is not condensed, so that what is asked is what is retrieved for."""
    calls = ("chat", "achat", "stream_chat", "astream_chat")
    for call in calls:
        found = getattr(kind.from_defaults(retriever=Shelf(), llm=llm), call)("harbour")
        response = await found if asyncio.iscoroutine(found) else found
        if call == "stream_chat":
            assert "".join(response.response_gen)
        if call == "astream_chat":
            assert "".join([text async for text in response.async_response_gen()])
    assert [ask.documents for ask in asks] == [texts("harbour")] * len(calls)


class Cut(BaseNodePostprocessor):
    """Gives the last node a new text."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: Any = None
    ) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(text="A cut letter.", metadata=nodes[-1].node.metadata))
        ]


async def test_nodes_that_postprocessors_made_reach_the_engine(
    llm: RagFuseLLM, asks: list[Ask]
) -> None:
    await every_way(Shelf(), llm, node_postprocessors=[Cut()])
    told = (("file_name: harbour-2\n\nA cut letter.", "harbour-2"), *texts("harbour"))
    assert [ask.documents for ask in asks] == [told] * 4


def test_nodes_of_an_event_reach_the_engine(llm: RagFuseLLM, asks: list[Ask]) -> None:
    """Third parties tell of them where no span of theirs takes or returns them."""
    get_dispatcher().event(ReRankEndEvent(nodes=nodes("harbour")))
    llm.complete("\n".join(text for text, _ in texts("harbour")))
    assert asks[0].documents == texts("harbour")


# by hand


async def test_nodes_put_into_a_prompt_by_hand_reach_the_engine(
    llm: RagFuseLLM, asks: list[Ask]
) -> None:
    text = joined(Shelf().retrieve("harbour"))
    llm.complete(text)
    list(llm.stream_chat([ChatMessage(text)]))
    assert [ask.documents for ask in asks] == [bare("harbour")] * 2
    text = joined(await Shelf().aretrieve("valley"))
    await llm.achat([ChatMessage(text)])
    _ = [each async for each in await llm.astream_complete(text)]
    assert [ask.documents for ask in asks[2:]] == [bare("valley")] * 2
    both = "\n\n".join(text for text, _ in texts("valley", "harbour"))
    await asyncio.to_thread(llm.complete, both)
    assert asks[-1].documents == texts("valley", "harbour")


@pytest.mark.parametrize("fused", [False, True])
async def test_nodes_handed_to_a_synthesizer_reach_the_engine(
    llm: RagFuseLLM, asks: list[Ask], fused: bool
) -> None:
    """They may be from anywhere: a search without a retriever, a cache."""
    synthesizer = RagFuseSynthesizer(llm) if fused else get_response_synthesizer(llm=llm)
    synthesizer.synthesize("When?", nodes("harbour"))
    await synthesizer.asynthesize("When?", nodes("harbour"))
    assert [ask.documents for ask in asks] == [texts("harbour")] * 2


# agents


class CallsOnce(RagFuseLLM):
    """Asks its engine only once its tool has answered: a random model writes no call."""

    async def astream_chat_with_tools(
        self, tools: Any, chat_history: Any = None, **kwargs: Any
    ) -> Any:
        if any("letter 1" in (each.content or "") for each in chat_history):
            return await self.astream_chat(chat_history)

        async def call() -> Any:
            block = ToolCallBlock(tool_name="letters", tool_kwargs={"input": "harbour"})
            yield ChatResponse(message=ChatMessage(role="assistant", blocks=[block]))

        return call()


async def test_what_an_agents_tool_retrieved_reaches_the_engine(
    engine: Engine, asks: list[Ask]
) -> None:
    tool = RetrieverTool.from_defaults(Shelf(), name="letters", description="Searches letters.")
    agent = FunctionAgent(tools=[tool], llm=CallsOnce(engine=engine, max_tokens=4))
    await agent.run("When?", max_iterations=4)
    assert asks[0].documents == texts("harbour")


# what must not be


class Broken(Shelf):
    """Finds nothing, as its index is gone."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise ZeroDivisionError


def test_failed_queries_leave_nothing_behind(llm: RagFuseLLM) -> None:
    with pytest.raises(ZeroDivisionError):
        over(Broken(), llm).query("harbour")
    assert len(events.QUERIES) == 0
