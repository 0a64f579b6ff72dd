"""A retriever as a tool of an agent, on the embedded model: what the tool returns comes from the
store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools.retriever import create_retriever_tool
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_ragfuse import ChatRagFuse, RagFuseIndexer

from integrations.tests.kit import LETTERS
from ragfuse import Engine, Settings

DOCUMENTS = [
    Document(text, metadata={"source": text.split(".")[0]}) for text in LETTERS.split("\n\n")
]
QUESTION = "What colour is the lighthouse of Port Elling?"
PROMPT = ChatPromptTemplate.from_messages(
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


@pytest.fixture
def llm(smollm: str, tmp_path: Any) -> Iterator[ChatRagFuse]:
    with Engine(
        Settings(model="smollm2-135m", dtype="float32", store=tmp_path / "store")
    ) as engine:
        yield ChatRagFuse(engine=engine, max_tokens=200, frequency_penalty=1.0)


@pytest.fixture(scope="module")
def retriever(minilm: str) -> Any:
    index = FAISS.from_documents(DOCUMENTS, HuggingFaceEmbeddings(model_name=minilm))
    return index.as_retriever(search_kwargs={"k": 2})


def hits(message: AIMessage) -> list[str]:
    segments = message.response_metadata["ragfuse"]["segments"]
    return [each["source"] for each in segments if each["kind"] == "chunk" and each["hit"]]


@pytest.mark.embedded
def test_what_a_retriever_tool_returns_hits_in_an_agents_loop(
    llm: ChatRagFuse, retriever: Any
) -> None:
    RagFuseIndexer(llm).index(DOCUMENTS)
    tools, heard = (
        [create_retriever_tool(retriever, "search", "Searches letters from Port Elling.")],
        Heard(),
    )
    agent = create_tool_calling_agent(SearchesOnce(llm), tools, PROMPT)  # type: ignore[arg-type]
    executor = AgentExecutor(agent=agent, tools=tools, return_intermediate_steps=True)
    found = executor.invoke({"input": QUESTION}, {"callbacks": [heard]})
    ((action, observation),) = found["intermediate_steps"]
    assert action.tool == "search"
    searched, answered = heard.messages
    assert searched.response_metadata["finish_reason"] == "tool_calls"
    assert hits(searched) == []
    assert sorted(hits(answered)) == sorted(
        text.split(".")[0] for text in observation.split("\n\n")
    )
    assert len(hits(answered)) == 2
    assert found["output"] == answered.content != ""
