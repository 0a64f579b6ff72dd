"""The conformance suite on the tiny model, on the embedded one, and on the framework's own mock."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import ClassVar

import pytest
from llama_index.core.llms import LLM, MockLLM
from llama_index.llms.ragfuse import RagFuseLLM

from integrations.tests.llama_index_events import text_of
from integrations.tests.llama_index_suite import MAX_SETTINGS_BYTES, LLMConformance
from ragfuse import Engine

THREADS = ("asyncio_", "ragfuse-encode", "ragfuse-writer", "ragfuse-notes")


class Conforming(LLMConformance):
    """The suite, and what a shipped file must not do."""

    def test_pickling_takes_its_settings_alone_or_is_refused(self, llm: LLM) -> None:
        """Never its weights."""
        llm.complete(self.question)
        written = b""
        with suppress(TypeError, ValueError, pickle.PicklingError):
            written = pickle.dumps(llm)
        if not written:
            return
        assert len(written) < MAX_SETTINGS_BYTES
        assert text_of(pickle.loads(written).complete(self.question)) == text_of(
            llm.complete(self.question)
        )


class TestTheTinyModel(Conforming):
    long_kwargs: ClassVar = {"max_tokens": 3000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 200}
    shared_threads = THREADS

    @pytest.fixture
    def llm(self, engine: Engine) -> LLM:
        return RagFuseLLM(engine=engine, max_tokens=12)


@pytest.mark.slow
class TestTheEmbeddedModel(Conforming):
    long_kwargs: ClassVar = {"max_tokens": 4_000, "reuse": False}
    object_kwargs: ClassVar = {"max_tokens": 60}
    shared_threads = THREADS

    @pytest.fixture
    def llm(self, real_engine: Engine) -> LLM:
        return RagFuseLLM(engine=real_engine, max_tokens=6)


class TestTheFrameworksMock(Conforming):
    unsupported: ClassVar = {
        "growing text": "MockLLM gives the whole text with every delta",
        "empty messages": "MockLLM answers what nobody asked",
        "model name": "MockLLM has no model",
        "usage": "MockLLM counts no tokens",
        "events once": "MockLLM inherits async calls that call the sync ones, and both tell",
        "free loop": "MockLLM answers before it first awaits anything",
        "cancelling": "MockLLM has answered before it can be cancelled",
        "structured": "MockLLM repeats the question and writes no JSON",
        "tools": "MockLLM is a CustomLLM, which calls no functions",
    }

    @pytest.fixture
    def llm(self) -> LLM:
        return MockLLM()
