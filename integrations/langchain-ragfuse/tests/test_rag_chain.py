"""A real chain: real splits, embeddings and FAISS index, the embedded model; nothing changed but
the chat model.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer
from langchain_text_splitters import RecursiveCharacterTextSplitter

from integrations.tests.kit import LETTERS
from ragfuse import Engine

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer in one short sentence."),
        ("user", "Passages:\n\n{context}\n\nQuestion: {question}"),
    ]
)
QUESTION = "What colour is the lighthouse painted?"


@pytest.fixture(scope="module")
def splits() -> list[Document]:
    splitter = RecursiveCharacterTextSplitter(chunk_size=400, chunk_overlap=0, add_start_index=True)
    return splitter.split_documents([Document(LETTERS, metadata={"source": "elling.txt"})])


@pytest.fixture(scope="module")
def retriever(minilm: str, splits: list[Document]) -> Any:
    return FAISS.from_documents(splits, HuggingFaceEmbeddings(model_name=minilm)).as_retriever(
        search_kwargs={"k": 3}
    )


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def rag(retriever: Any, llm: Runnable[Any, Any]) -> Runnable[str, Any]:
    return {"context": retriever | joined, "question": RunnablePassthrough()} | PROMPT | llm


def trace(message: Any) -> dict[str, Any]:
    return message.response_metadata["ragfuse"]


def hits(message: Any) -> int:
    return sum(each["hit"] for each in trace(message)["segments"] if each["kind"] == "chunk")


@pytest.mark.embedded
def test_an_lcel_chain_reuses_what_was_indexed(
    real_engine: Engine, retriever: Any, splits: list[Document]
) -> None:
    llm = ChatRagFuse(engine=real_engine)
    RagFuseIndexer(llm).index(splits)
    answer = rag(retriever, llm).invoke(QUESTION)
    assert hits(answer) == 3
    assert {each["source"] for each in trace(answer)["segments"] if each["hit"]} == {"elling.txt"}
    assert (
        answer.usage_metadata["input_token_details"]["cache_read"]
        > answer.usage_metadata["input_tokens"] / 2
    )
    full = rag(retriever, llm.bind(reuse=False)).invoke(QUESTION)
    assert rag(retriever, llm.bind(ratio=1.0)).invoke(QUESTION).content == full.content
    assert "green" in full.content


@pytest.mark.embedded
def test_a_chain_over_documents_reuses_them(real_engine: Engine, retriever: Any) -> None:
    llm, given = (
        ChatRagFuse(engine=real_engine),
        {"context": retriever.invoke(QUESTION), "question": QUESTION},
    )
    message = RunnableLambda(lambda answer: answer)
    chain = create_stuff_documents_chain(llm, PROMPT, output_parser=message)
    assert hits(chain.invoke(given)) == 0
    real_engine.flush()
    # in the same order they are reused as the prompt's beginning
    first, second, third = given["context"]
    assert hits(chain.invoke({**given, "context": [second, third, first]})) == 3


@pytest.mark.embedded
async def test_the_chain_streams_asynchronously(
    real_engine: Engine, retriever: Any, splits: list[Document]
) -> None:
    llm = ChatRagFuse(engine=real_engine)
    await RagFuseIndexer(llm).aindex(splits, PROMPT)
    chunks = [chunk async for chunk in rag(retriever, llm).astream(QUESTION)]
    assert len(chunks) > 3
    assert hits(sum(chunks[1:], chunks[0])) == 3
