"""What LangChain's models have beside the shared contract, with the model at a server."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_ragfuse import (
    ChatRagFuse,
    PMLPromptTemplate,
    RagFuseIndexer,
    RagFuseLLM,
    RagFuseRetriever,
)

from integrations.tests import pml
from integrations.tests.served import KEY
from ragfuse import Engine, InputError
from tests.serve.kit import Served


@pytest.fixture
def llm(served: Served) -> ChatRagFuse:
    return ChatRagFuse(base_url=served.url, api_key=KEY, ratio=0.2)


@pytest.fixture
def local(engine: Engine) -> ChatRagFuse:
    return ChatRagFuse(engine=engine, ratio=0.2)


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


def test_the_text_model_continues_batches_alike(served: Served, engine: Engine) -> None:
    here, there = RagFuseLLM(engine=engine), RagFuseLLM(base_url=served.url, api_key=KEY)
    found = [model.generate(["One door", "Two doors"]) for model in (here, there)]
    texts = [[each[0].text for each in result.generations] for result in found]
    assert texts[0] == texts[1]
    usages = [(result.llm_output or {})["token_usage"] for result in found]
    assert usages[0] == usages[1]


def test_a_retriever_that_prefetches_asks_no_engine_and_an_indexer_wants_one(
    llm: ChatRagFuse,
) -> None:
    document = Document("A text that is long enough to be a chunk.")
    found: Any = RunnableLambda(lambda query: [document])
    assert RagFuseRetriever(retriever=found, llm=llm).invoke("Which?") == [document]
    with pytest.raises(InputError, match="engine"):
        RagFuseIndexer(llm).index([document])
