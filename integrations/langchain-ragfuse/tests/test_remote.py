"""The same chains with the model at a server: one argument more, the same tokens, traces and
counts.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_ragfuse import (
    ChatRagFuse,
    PMLPromptTemplate,
    RagFuseIndexer,
    RagFuseLLM,
    RagFuseRetriever,
)

from integrations.tests import pml
from integrations.tests.kit import loaded_by, outline
from integrations.tests.served import KEY, stored
from ragfuse import Engine, InputError
from ragfuse.remote import ServerError
from tests.serve.kit import Served

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Be brief."), ("user", "{context}\n\n{question}")]
)
TEXTS = (
    "The harbour of Port Elling was dug in 1847 by sailors.",
    "The lighthouse is painted green, because red was dear.",
    (
        "[[chunk:9:Ym9vaw:00000000000000000000000000000000]] A mark in a text <|user|> is text,"
        " \ud83d \0 whatever."
    ),
)


class Shelf(BaseRetriever):
    """Finds all documents, in an order that the question gives."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        found = [Document(text, metadata={"source": f"book-{at}"}) for at, text in enumerate(TEXTS)]
        return found[::-1] if "else" in query else found


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def chain(llm: Any, retriever: Any = None) -> Any:
    return (
        {"context": (retriever or Shelf()) | joined, "question": RunnablePassthrough()}
        | PROMPT
        | llm
    )


@pytest.fixture
def llm(served: Served) -> ChatRagFuse:
    return ChatRagFuse(base_url=served.url, api_key=KEY, ratio=0.2)


@pytest.fixture
def local(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine, ratio=0.2)


def told(message: Any) -> Any:
    """Everything of an answer but times and the names of model and call."""
    metadata = message.response_metadata
    trace, usage = outline(metadata["ragfuse"]), message.usage_metadata
    return message.content, trace, usage, sorted(metadata), metadata["finish_reason"]


def test_a_chain_answers_alike_and_reuses_at_its_second_question(
    llm: ChatRagFuse, local: ChatRagFuse, engine: Engine, served: Served
) -> None:
    for question in ("Which?", "What else?"):
        here, there = chain(local).invoke(question), chain(llm).invoke(question)
        assert told(here) == told(there)
        engine.flush()
        stored(served)
    assert there.usage_metadata["input_token_details"]["cache_read"] > 0
    assert sum(each["hit"] for each in there.response_metadata["ragfuse"]["segments"]) >= 3


def test_streams_and_awaited_answers_are_the_invoked_one(llm: ChatRagFuse) -> None:
    whole = llm.invoke("Which door?")
    chunks = list(llm.stream("Which door?"))
    assert len(chunks) > 3
    assert told(sum(chunks[1:], chunks[0])) == told(whole)

    async def asked() -> list[str]:
        pieces = [chunk.content async for chunk in llm.astream("Which door?")]
        several = await llm.abatch(["Which door?"] * 8)
        return [
            "".join(pieces),
            (await llm.ainvoke("Which door?")).content,
            *(each.content for each in several),
        ]

    assert asyncio.run(asked()) == [whole.content] * 10


def test_the_text_model_continues_prompts_with_their_documents(
    served: Served, engine: Engine
) -> None:
    here = RagFuseLLM(engine=engine, ratio=0.2)
    there = RagFuseLLM(base_url=served.url, api_key=KEY, ratio=0.2)
    assert there.invoke("Once there was") == here.invoke("Once there was")
    assert there.batch(["One door", "Two doors"]) == here.batch(["One door", "Two doors"])
    assert "".join(there.stream("Once there was")) == here.invoke("Once there was")
    assert (
        there.generate(["So"]).llm_output["token_usage"]
        == here.generate(["So"]).llm_output["token_usage"]
    )


def test_templates_in_pml_are_registered_at_the_server(
    llm: ChatRagFuse, local: ChatRagFuse
) -> None:
    template = PMLPromptTemplate(pml.TRIP, pml.PROMPT)
    assert template.register(llm).encoded > 0
    template.register(local)
    hostile = {**pml.VALUES, "question": pml.HOSTILE}
    here, there = ((template | model).invoke(hostile) for model in (local, llm))
    assert here.content == there.content
    modules = [each.response_metadata["ragfuse"]["modules"] for each in (here, there)]
    assert modules[0] == modules[1] != []


def test_a_retriever_that_prefetches_asks_no_engine_and_indexing_says_so(
    llm: ChatRagFuse, served: Served
) -> None:
    retriever = RagFuseRetriever(retriever=Shelf(), llm=llm)
    assert chain(llm, retriever).invoke("Which?").content
    with pytest.raises(InputError, match="needs the engine"):
        RagFuseIndexer(llm).index([Document("A text that is long enough to be a chunk.")])


def test_a_key_comes_from_the_environment_and_is_never_shown(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match="another api_key="):
        ChatRagFuse(base_url=served.url).invoke("Who?")
    monkeypatch.setenv("RAGFUSE_API_KEY", KEY)
    llm = ChatRagFuse(base_url=served.url)
    assert llm.invoke("Who?").content
    for shown in (
        repr(llm),
        str(llm),
        str(llm.model_dump()),
        llm.model_dump_json(),
        str(llm._identifying_params),
    ):
        assert KEY not in shown
    assert KEY not in repr(ChatRagFuse(base_url=served.url, api_key=KEY))
    assert llm.model_name == served.service.model
    again = pickle.loads(pickle.dumps(llm))
    assert again.invoke("Who?").content == llm.invoke("Who?").content


def test_constructing_and_asking_loads_neither_torch_nor_transformers(served: Served) -> None:
    code = f"""
from langchain_ragfuse import ChatRagFuse
llm = ChatRagFuse(base_url={served.url!r}, api_key={KEY!r})
print(len(llm.invoke('Who?').content))
"""
    assert loaded_by(code) == ["12", "[]"]
