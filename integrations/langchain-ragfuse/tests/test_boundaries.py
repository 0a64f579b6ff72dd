"""Unchanged prompts of real chains: whatever happens to documents between index and prompt, known
chunks still hit.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage, messages_from_dict, messages_to_dict
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools.retriever import create_retriever_tool
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer, RagFuseLLM
from langchain_ragfuse.messages import to_ragfuse_messages

from integrations.tests.kit import LETTERS, hits
from ragfuse import Engine, Settings

DOCUMENTS = [
    Document(f"{text}\n", metadata={"source": f"{text.split('.')[0]}.txt", "page": page})
    for page, text in enumerate(LETTERS.split("\n\n"), 1)
]
SOURCES = {str(document.metadata["source"]) for document in DOCUMENTS}
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer briefly."), ("user", "{context}\n\nQuestion: {input}")]
)
QUESTION = "Who was the last keeper of the lighthouse?"


class Heard(BaseCallbackHandler):
    """The segments of every answer that a chain got on its way."""

    def __init__(self) -> None:
        self.traces: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        found = response.generations[0][0]
        told = (
            found.message.response_metadata
            if hasattr(found, "message")
            else found.generation_info or {}
        )
        self.traces.append(told["ragfuse"])


class ByWords(BaseCrossEncoder):
    """Scores by shared words: another order than the embeddings'."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        return [-len(set(query.split()) & set(text.split())) for query, text in text_pairs]


@pytest.fixture(scope="module")
def embedder(minilm: str) -> HuggingFaceEmbeddings:
    return HuggingFaceEmbeddings(model_name=minilm)


@pytest.fixture(scope="module")
def retriever(embedder: HuggingFaceEmbeddings) -> BaseRetriever:
    return FAISS.from_documents(DOCUMENTS, embedder).as_retriever(search_kwargs={"k": 4})


@pytest.fixture
def llm(engine: Engine) -> ChatRagFuse:
    llm = ChatRagFuse(engine=engine, max_tokens=4)
    RagFuseIndexer(llm).index(DOCUMENTS)
    return llm


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def lcel(llm: Any, retriever: Any) -> Runnable[Any, Any]:
    return {"context": retriever | joined, "input": RunnablePassthrough()} | PROMPT | llm


def classic(llm: Any, retriever: Any) -> Runnable[Any, Any]:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
    return RunnableLambda(lambda question: {"input": question}) | chain


def legacy(llm: Any, retriever: Any) -> Runnable[Any, Any]:
    return RetrievalQA.from_chain_type(llm, retriever=retriever)


def asked(make: Callable[[Any, Any], Runnable[Any, Any]], llm: Any, retriever: Any) -> list[str]:
    heard = Heard()
    make(llm, retriever).invoke(QUESTION, {"callbacks": [heard]})
    return hits(heard.traces[-1])


@pytest.mark.parametrize("make", [lcel, classic, legacy])
def test_documents_hit_in_every_chain_also_where_they_are_reranked(
    make: Any, llm: ChatRagFuse, retriever: BaseRetriever
) -> None:
    for model in (llm, RagFuseLLM(engine=llm.get_engine(), max_tokens=4)):
        assert set(asked(make, model, retriever)) == SOURCES
    reranker = CrossEncoderReranker(model=ByWords(), top_n=3)
    reranked = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=retriever)
    orders = [
        [each.metadata["source"] for each in by.invoke(QUESTION)] for by in (retriever, reranked)
    ]
    assert orders[0][:3] != orders[1] == asked(make, llm, reranked)


def test_an_artifact_marks_the_chunks_of_a_tools_message(
    tiny_settings: Settings, retriever: BaseRetriever
) -> None:
    """Nothing was indexed or heard: without its artifact the same message teaches the store
    nothing.
    """
    search = create_retriever_tool(
        retriever,
        "search",
        "Looks things up.",
        document_prompt=PromptTemplate.from_template(
            "[{page}] From {source}:\n{page_content}\n---"
        ),
        response_format="content_and_artifact",
    )
    call = {"name": "search", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}
    found = search.invoke(call)
    bare = found.model_copy(update={"artifact": None})
    hit = []
    with Engine(tiny_settings.model_copy(update={"learn": "off"})) as engine:
        for message in (bare, bare, found, found):
            answer = ChatRagFuse(engine=engine, max_tokens=4).invoke([("user", QUESTION), message])
            hit.append(set(hits(answer.response_metadata["ragfuse"])))
            engine.flush()
    assert hit == [set(), set(), set(), SOURCES]


@pytest.mark.parametrize(
    "stored",
    [
        lambda message: messages_from_dict(json.loads(json.dumps(messages_to_dict([message]))))[0],
        lambda message: type(message).model_validate_json(message.model_dump_json()),
        lambda message: pickle.loads(pickle.dumps(message)),
    ],
)
def test_a_message_is_read_alike_before_and_after_it_is_stored(
    stored: Callable[[Any], Any],
) -> None:
    text = "".join(f"{number}. {each.page_content}" for number, each in enumerate(DOCUMENTS))
    message = ToolMessage(text, tool_call_id="1", artifact={"found": DOCUMENTS})
    (first,), (again,) = (to_ragfuse_messages([each]) for each in (message, stored(message)))
    assert first == again
    assert {piece.source for piece in again.pieces if piece.kind == "chunk"} == SOURCES
