"""What LlamaIndex's LLM has beside the shared contract, with the LLM at a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from llama_index.llms.ragfuse import PMLPromptTemplate, RagFuseLLM, traces

from integrations.tests import pml
from integrations.tests.llama_index_suite import LLMConformance
from integrations.tests.served import KEY
from ragfuse import Engine, Settings
from tests.serve.kit import Served, process


@pytest.fixture
def llm(served: Served) -> RagFuseLLM:
    return RagFuseLLM(base_url=served.url, api_key=KEY, ratio=0.2)


@pytest.fixture
def local(engine: Engine) -> RagFuseLLM:
    return RagFuseLLM(engine=engine, ratio=0.2)


def test_templates_in_pml_are_registered_at_the_server(llm: RagFuseLLM, local: RagFuseLLM) -> None:
    template = PMLPromptTemplate(pml.TRIP, pml.PROMPT)
    assert template.register(llm).encoded > 0
    template.register(local)
    answers = []
    for model in (local, llm):
        with traces() as found:
            answers.append(
                (
                    model.predict(template, **{**pml.VALUES, "question": pml.HOSTILE}),
                    found[0].modules,
                )
            )
    assert answers[0] == answers[1]
    assert answers[1][1] != ()


@pytest.fixture(scope="module")
def url(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in a process of its own, whose threads are no leak of a client."""
    home = tmp_path_factory.mktemp("conformance")
    settings = Settings(
        model=str(tiny_path), dtype="float32", store=home / "store", home=home, max_tokens=12
    )
    with process(settings) as (_, found):
        yield found


class TestTheTinyModelAtAServer(LLMConformance):
    long_kwargs: ClassVar = {"max_tokens": 3000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 200}

    @pytest.fixture
    def llm(self, url: str) -> RagFuseLLM:
        return RagFuseLLM(base_url=url)
