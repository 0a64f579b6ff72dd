"""A real chain: real splits, embeddings and FAISS index, the embedded model; nothing changed but
the chat model.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer
from langchain_text_splitters import RecursiveCharacterTextSplitter

from integrations.tests.kit import LETTERS, hits
from ragfuse import Engine

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer in one short sentence."),
        ("user", "Passages:\n\n{context}\n\nQuestion: {question}"),
    ]
)
QUESTION = "What colour is the lighthouse painted?"


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def rag(retriever: Any, llm: Runnable[Any, Any]) -> Runnable[str, Any]:
    return {"context": retriever | joined, "question": RunnablePassthrough()} | PROMPT | llm


@pytest.mark.embedded
async def test_an_lcel_chain_reuses_what_was_indexed(real_engine: Engine, minilm: str) -> None:
    splitter = RecursiveCharacterTextSplitter(chunk_size=400, chunk_overlap=0)
    splits = splitter.split_documents([Document(LETTERS, metadata={"source": "elling.txt"})])
    index = FAISS.from_documents(splits, HuggingFaceEmbeddings(model_name=minilm))
    retriever = index.as_retriever(search_kwargs={"k": 3})
    llm = ChatRagFuse(engine=real_engine)
    await RagFuseIndexer(llm).aindex(splits, PROMPT)
    answer = rag(retriever, llm).invoke(QUESTION)
    assert hits(answer.response_metadata["ragfuse"]) == ["elling.txt"] * 3
    usage = answer.usage_metadata
    assert usage["input_token_details"]["cache_read"] > usage["input_tokens"] / 2
    chunks = [chunk async for chunk in rag(retriever, llm).astream(QUESTION)]
    assert sum(chunks[1:], chunks[0]).content == answer.content
    full = rag(retriever, llm.bind(reuse=False)).invoke(QUESTION)
    assert rag(retriever, llm.bind(ratio=1.0)).invoke(QUESTION).content == full.content
    assert "green" in full.content
