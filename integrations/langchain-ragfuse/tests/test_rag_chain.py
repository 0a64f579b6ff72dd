"""A real chain and a real agent: real splits, embeddings and FAISS index, the embedded model; nothing
changed but the chat model.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools.retriever import create_retriever_tool
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


# an agent

AGENT = ChatPromptTemplate.from_messages(
    [
        ("system", "Search, then answer."),
        ("human", "{input}"),
        ("placeholder", "{agent_scratchpad}"),
    ]
)


class Heard(BaseCallbackHandler):
    """The messages of every answer on the way."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.messages.append(response.generations[0][0].message)  # type: ignore[union-attr]


class SearchesOnce:
    """The model with its tools: it must search first and may not then; a model this small does not
    choose by itself.
    """

    def __init__(self, llm: ChatRagFuse) -> None:
        self.llm = llm

    def bind_tools(self, tools: Any) -> Runnable[Any, Any]:
        search, answer = (
            self.llm.bind_tools(tools, tool_choice=choice) for choice in ("any", "none")
        )
        return RunnableLambda(
            lambda value: (
                answer
                if any(isinstance(each, ToolMessage) for each in value.to_messages())
                else search
            )
        )


@pytest.mark.embedded
def test_what_a_retriever_tool_returns_hits_in_an_agents_loop(
    real_engine: Engine, minilm: str
) -> None:
    documents = [Document(each, metadata={"source": each[:9]}) for each in LETTERS.split("\n\n")]
    index = FAISS.from_documents(documents, HuggingFaceEmbeddings(model_name=minilm))
    retriever = index.as_retriever(search_kwargs={"k": 2})
    llm, heard = ChatRagFuse(engine=real_engine, max_tokens=200, frequency_penalty=1.0), Heard()
    RagFuseIndexer(llm).index(documents)
    tools = [create_retriever_tool(retriever, "search", "Searches letters from Port Elling.")]
    agent = create_tool_calling_agent(SearchesOnce(llm), tools, AGENT)  # type: ignore[arg-type]
    executor = AgentExecutor(agent=agent, tools=tools, return_intermediate_steps=True)
    found = executor.invoke({"input": QUESTION}, {"callbacks": [heard]})
    ((action, observation),) = found["intermediate_steps"]
    assert action.tool == "search"
    searched, answered = heard.messages
    assert searched.response_metadata["finish_reason"] == "tool_calls"
    sources = [hits(each.response_metadata["ragfuse"]) for each in (searched, answered)]
    assert sources[0] == []
    assert sorted(sources[1]) == sorted(each[:9] for each in observation.split("\n\n"))
    assert len(sources[1]) == 2
    assert found["output"] == answered.content != ""
