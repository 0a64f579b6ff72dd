"""The conformance suite on the tiny model and on the embedded one."""

from __future__ import annotations

from typing import ClassVar

import pytest
from llama_index.core.llms import LLM
from llama_index.llms.ragfuse import RagFuseLLM

from integrations.tests.llama_index_suite import LLMConformance
from ragfuse import Engine

THREADS = ("asyncio_", "ragfuse-encode", "ragfuse-writer", "ragfuse-notes")


class TestTheTinyModel(LLMConformance):
    long_kwargs: ClassVar = {"max_tokens": 3000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 200}
    shared_threads = THREADS

    @pytest.fixture
    def llm(self, engine: Engine) -> LLM:
        return RagFuseLLM(engine=engine, max_tokens=12)


@pytest.mark.slow
class TestTheEmbeddedModel(LLMConformance):
    long_kwargs: ClassVar = {"max_tokens": 4_000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 60}
    shared_threads = THREADS

    @pytest.fixture
    def llm(self, real_engine: Engine) -> LLM:
        return RagFuseLLM(engine=real_engine, max_tokens=6)
