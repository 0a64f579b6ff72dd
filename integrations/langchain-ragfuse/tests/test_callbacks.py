"""What any retriever returned reaches the engine with the question: nothing is changed but the
model.

The engine is tiny and random, and what it is asked is looked at, not what it answers.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.tools.retriever import create_retriever_tool
from langchain_ragfuse import ChatRagFuse, RagFuseLLM
from langchain_ragfuse.callbacks import LISTENER

from ragfuse import Ask, Engine

PROMPT = ChatPromptTemplate.from_template("Passages:\n\n{context}\n\nQuestion: {input}")
CUT = "The harbour letter."
Heard = tuple[tuple[str, str], ...]


class Shelf(BaseRetriever):
    """Returns two documents that are named after the question."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return documents(query)


class Cut(BaseDocumentCompressor):
    """Keeps the last document, the way a reranker would, with another text."""

    def compress_documents(
        self, documents: Any, query: str, callbacks: Any = None
    ) -> list[Document]:
        return [Document(CUT, metadata=documents[-1].metadata)]


def documents(query: str) -> list[Document]:
    return [
        Document(
            f"\n The {query} letter {n} of Port Elling. \n", metadata={"source": f"{query}-{n}"}
        )
        for n in (1, 2)
    ]


def texts(*queries: str) -> Heard:
    """What the engine is to hear of these questions' documents: stripped, with their sources."""
    return tuple(
        (each.page_content.strip(), each.metadata["source"])
        for query in queries
        for each in documents(query)
    )


def joined(found: list[Document]) -> str:
    return "\n\n".join(each.page_content for each in found)


@pytest.fixture(autouse=True)
def all_ended(nothing_heard: None) -> Iterator[None]:
    """No test leaves a run behind."""
    yield
    assert len(LISTENER.runs) == 0


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine, max_tokens=4)


def rag(retriever: Runnable[Any, Any], llm: Runnable[Any, Any]) -> Runnable[str, Any]:
    return {"context": retriever | joined, "input": RunnablePassthrough()} | PROMPT | llm


async def every_way(chain: Runnable[Any, Any], given: Any) -> list[str]:
    """Ask by each of LangChain's calls; the ways, in order."""
    chain.invoke(given)
    await chain.ainvoke(given)
    list(chain.stream(given))
    _ = [chunk async for chunk in chain.astream(given)]
    _ = [event async for event in chain.astream_events(given, version="v2")]
    chain.batch([given])
    await chain.abatch([given])
    return ["invoke", "ainvoke", "stream", "astream", "astream_events", "batch", "abatch"]


def plain(llm: Any) -> Any:
    return rag(Shelf(), llm)


def stuffed(llm: Any) -> Any:
    """The documents may be from anywhere: a search without a retriever, a cache."""
    chain = create_stuff_documents_chain(llm, PROMPT)
    return (lambda question: {"input": question, "context": documents("harbour")}) | chain


def compressed(llm: Any) -> Any:
    return rag(ContextualCompressionRetriever(base_compressor=Cut(), base_retriever=Shelf()), llm)


def retrieval(llm: Any) -> Any:
    chain = create_retrieval_chain(Shelf(), create_stuff_documents_chain(llm, PROMPT))
    return (lambda question: {"input": question}) | chain


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
@pytest.mark.parametrize("chain", [plain, stuffed, compressed, retrieval])
async def test_what_a_chain_retrieved_reaches_the_engine(
    engine: Engine, asks: list[Ask], kind: Any, chain: Any
) -> None:
    ways = await every_way(chain(kind(engine=engine, max_tokens=4)), "harbour")
    cut = ((CUT, "harbour-2"),) if chain is compressed else ()
    assert [ask.documents for ask in asks] == [(*cut, *texts("harbour"))] * len(ways), ways


# apart


async def test_a_batch_keeps_its_questions_apart(llm: ChatRagFuse, asks: list[Ask]) -> None:
    questions = [f"harbour {number}" for number in range(6)]
    for limit in (None, 2):
        plain(llm).batch(questions, {"max_concurrency": limit})
        await plain(llm).abatch(questions, {"max_concurrency": limit})
    assert Counter(ask.documents for ask in asks) == {texts(each): 4 for each in questions}


async def test_prompts_answered_together_know_all_their_documents(
    engine: Engine, asks: list[Ask]
) -> None:
    """A text model answers a batch's prompts at once, so that they are one wish."""
    chain, questions = plain(RagFuseLLM(engine=engine, max_tokens=4)), ["harbour", "valley", "mill"]
    chain.batch(questions)
    await chain.abatch(questions)
    assert [set(ask.documents) for ask in asks] == [set(texts(*questions))] * 2


# by hand


@pytest.mark.parametrize("kind", [ChatRagFuse, RagFuseLLM])
async def test_documents_put_into_a_prompt_by_hand_reach_the_engine(
    engine: Engine, asks: list[Ask], kind: Any
) -> None:
    llm, retriever = kind(engine=engine, max_tokens=4), Shelf()
    prompt = f"{joined(retriever.invoke('harbour'))}\nWhen?"
    llm.invoke(prompt)
    list(llm.stream(prompt))
    assert [ask.documents for ask in asks] == [texts("harbour")] * 2
    prompt = f"{joined(await retriever.ainvoke('valley'))}\nWhen?"
    await llm.ainvoke(prompt)
    _ = [chunk async for chunk in llm.astream(prompt)]
    await asyncio.to_thread(llm.invoke, prompt)
    assert [ask.documents for ask in asks[2:]] == [texts("valley", "harbour")] * 3


# tools


@tool(response_format="content_and_artifact")
def lookup(query: str) -> tuple[str, list[Document]]:
    """Searches without a retriever."""
    return joined(documents(query)), documents(query)


@tool
def found(query: str) -> list[Document]:
    """Searches without a retriever, and returns documents themselves."""
    return documents(query)


CALL = {"name": "lookup", "args": {"query": "harbour"}, "id": "1", "type": "tool_call"}


@pytest.mark.parametrize("name", ["search", "found", "lookup"])
async def test_what_a_tool_returned_reaches_the_engine(
    llm: ChatRagFuse, asks: list[Ask], name: str
) -> None:
    search = create_retriever_tool(Shelf(), "search", "Searches letters.")
    used = {"search": search, "found": found, "lookup": lookup}[name]

    def loop(_: str) -> Any:
        if name != "lookup":
            return llm.invoke(f"{used.invoke({'query': 'harbour'})}\nWhen?")
        said = AIMessage("", tool_calls=[CALL])  # type: ignore[list-item]
        return llm.invoke([HumanMessage("When?"), said, used.invoke(CALL)])

    RunnableLambda(loop).invoke("")
    await RunnableLambda(loop).ainvoke("")
    loop("")
    assert [ask.documents for ask in asks] == [texts("harbour")] * 3


# what must not be


class Named(AsyncCallbackHandler):
    """The events of a user's own handler."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("start")

    async def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.names.append("end")


async def test_other_handlers_hear_all_that_they_heard_before() -> None:
    """LangChain tells the beginning of a text model to inline handlers alone, if there are any."""
    named = Named()
    await FakeListLLM(responses=["1847"]).ainvoke("When?", {"callbacks": [named]})
    assert named.names == ["start", "end"]


async def test_failed_and_abandoned_runs_leave_nothing_behind(llm: ChatRagFuse) -> None:
    failing = Shelf() | RunnableLambda(lambda found: found[2])
    with pytest.raises(IndexError):
        failing.invoke("harbour")
    with pytest.raises(IndexError):
        await failing.ainvoke("harbour")
    stream = plain(llm).stream("harbour")
    next(stream)
    stream.close()


def test_a_handler_that_is_copied_or_pickled_is_the_same() -> None:
    config: dict[str, list[BaseCallbackHandler]] = {"callbacks": [LISTENER]}
    assert deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
