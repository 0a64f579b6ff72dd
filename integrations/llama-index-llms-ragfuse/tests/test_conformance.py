"""The conformance suite on the tiny model, in this process and at a server, and on the embedded one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from llama_index.core.llms import LLM
from llama_index.llms.ragfuse import RagFuseLLM

from integrations.tests.llama_index_suite import LLMConformance
from ragfuse import Engine, Settings
from tests.kits.serve import process

THREADS = ("asyncio_", "ragfuse-encode", "ragfuse-writer", "ragfuse-notes")


class TestTheTinyModel(LLMConformance):
    long_kwargs: ClassVar = {"max_tokens": 3000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 200}
    shared_threads = THREADS

    @pytest.fixture
    def llm(self, engine: Engine) -> LLM:
        return RagFuseLLM(engine=engine, max_tokens=12)


class TestTheTinyModelAtAServer(TestTheTinyModel):
    @pytest.fixture(scope="class")
    def url(self, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """The address of a server in a process of its own, whose threads are no leak of a client."""
        home = tmp_path_factory.mktemp("conformance")
        own = {"store": home / "store", "home": home, "max_tokens": 12}
        with process(Settings(model=str(tiny_path), dtype="float32", **own)) as (_, found):
            yield found

    @pytest.fixture
    def llm(self, url: str) -> LLM:
        return RagFuseLLM(base_url=url)


@pytest.mark.slow
class TestTheEmbeddedModel(LLMConformance):
    long_kwargs: ClassVar = {"max_tokens": 4_000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 60}
    shared_threads = THREADS

    @pytest.fixture
    def llm(self, real_engine: Engine) -> LLM:
        return RagFuseLLM(engine=real_engine, max_tokens=6)
