"""RagFuseRetriever: the inner retriever's documents as they are, and their KV on its way to memory."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer, RagFuseRetriever
from langchain_ragfuse.documents import text_of

from integrations.tests.kit import LETTERS
from ragfuse import Engine, InputError, Settings

DOCUMENTS = [Document(text, metadata={"source": text.split(".")[0]}) for text in LETTERS.split("\n\n")]
PAGE = PromptTemplate.from_template("From {source}:\n{page_content}")
PROMPT = ChatPromptTemplate.from_messages([("user", "{context}\n\nQuestion: {input}")])


class Fixed(BaseRetriever):
    """All documents, or the error that the query names."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any, limit: int = 9) -> list[Document]:
        if query == "fail":
            raise ValueError("The index is gone.")
        return DOCUMENTS[:limit]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any, limit: int = 9) -> list[Document]:
        return self._get_relevant_documents(query, run_manager=run_manager, limit=limit)


class Heard(BaseCallbackHandler):
    """What retrievers told on their way."""

    def __init__(self) -> None:
        self.started: list[tuple[str, Any, Any]] = []
        self.errors: list[BaseException] = []
        self.found: list[Any] = []

    def on_retriever_start(self, serialized: Any, query: str, **kwargs: Any) -> None:
        self.started.append((query, kwargs["tags"], kwargs["metadata"]))

    def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
        self.found.append(documents)

    def on_retriever_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


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


def test_a_chain_answers_as_without_it(indexed: Settings) -> None:
    def joined(documents: list[Document]) -> str:
        return "\n\n".join(text_of(document, PAGE)[0] for document in documents)

    answers = []
    with Engine(indexed) as engine:
        RagFuseIndexer(engine, PAGE).index(DOCUMENTS)
    for wrap in (False, True):
        with Engine(indexed) as engine:
            llm = ChatRagFuse(engine=engine, ratio=1.0)
            retriever = RagFuseRetriever(retriever=Fixed(), llm=llm, document_prompt=PAGE) if wrap else Fixed()
            chain = {"context": retriever | joined, "input": RunnablePassthrough()} | PROMPT | llm
            answers.append(chain.invoke("How many ships?"))
    assert answers[0].content == answers[1].content
    hits = [sum(each["hit"] for each in answer.response_metadata["ragfuse"]["segments"]) for answer in answers]
    assert hits[0] == hits[1] >= len(DOCUMENTS)


def test_what_the_store_does_not_hold_is_no_trouble(engine: Engine) -> None:
    assert RagFuseRetriever(retriever=Fixed(), llm=engine).invoke("ships") == DOCUMENTS


def test_what_was_never_indexed_is_learnt_from_a_chain_as_it_is(engine: Engine) -> None:
    llm = ChatRagFuse(engine=engine)
    retriever = RagFuseRetriever(retriever=Fixed(), llm=llm, document_prompt=PAGE)
    texts = RunnableLambda(lambda found: "\n\n".join(text_of(document, PAGE)[0] for document in found))
    chain = {"context": retriever | texts, "input": RunnablePassthrough()} | PROMPT | llm
    assert _sources_hit(chain.invoke("How many ships?")) == []
    engine.flush()
    assert _sources_hit(chain.invoke("How many trees?")) == [document.metadata["source"] for document in DOCUMENTS]


async def test_tags_metadata_callbacks_and_errors_pass_through(engine: Engine) -> None:
    wrapped = RagFuseRetriever(retriever=Fixed(tags=["inner"]), llm=engine, tags=["outer"], metadata={"kind": "fixed"})
    heard = Heard()
    config = {"callbacks": [heard], "tags": ["call"], "metadata": {"user": "me"}}
    wrapped.invoke("ships", config)
    await wrapped.ainvoke("ships", config)
    assert [query for query, _, _ in heard.started] == ["ships"] * 4
    outer, inner = heard.started[:2]
    assert {"outer", "call"} <= set(outer[1])
    assert {"inner", "call"} <= set(inner[1])
    assert outer[2].items() >= {"kind": "fixed", "user": "me"}.items()
    assert inner[2].items() >= {"user": "me"}.items()
    assert heard.found == [DOCUMENTS] * 4
    with pytest.raises(ValueError, match="The index is gone"):
        wrapped.invoke("fail", config)
    with pytest.raises(ValueError, match="The index is gone"):
        await wrapped.ainvoke("fail", config)
    assert len(heard.errors) == 4


def test_a_model_without_a_store_is_refused() -> None:
    with pytest.raises(InputError, match="has no chunk store"):
        RagFuseRetriever(retriever=Fixed(), llm=PROMPT).invoke("ships")


def _sources_hit(message: Any) -> list[str]:
    segments = message.response_metadata["ragfuse"]["segments"]
    return [each["source"] for each in segments if each["kind"] == "chunk" and each["hit"]]


def _in_memory(engine: Engine) -> int:
    return sum(entry.tier == "memory" for entry in engine.store.entries())
