"""LangChain's own suites for chat models; those for tools and structured output are skipped: it has neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_ragfuse import ChatRagFuse
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ragfuse import Engine, Settings

PASSAGE = "The lighthouse keeper counted forty ships that night and wrote all of their names into a blue book."
DETAILS = ["cache_read_input", "cache_creation_input"]


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"RAGFUSE_MODEL": "some-model"}, {}, {"model_name": "some-model"}


class TestTiny(ChatModelIntegrationTests):
    """On the tiny random model."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagFuse

    @pytest.fixture
    def model(self, engine: Engine) -> ChatRagFuse:
        self.engine = engine
        return ChatRagFuse(engine=engine, max_tokens=24)

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        block = {"type": "text", "text": PASSAGE, "extras": {"ragfuse": {"chunk": True}}}
        return self._asked([("user", [block, "\n\nHow many ships were there?"])], stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self.engine.ingest([(PASSAGE, "log.txt")])
        return self._asked([("user", f"{PASSAGE}\n\nHow many ships were there?")], stream)

    def _asked(self, messages: Any, stream: bool) -> AIMessage:
        llm = ChatRagFuse(engine=self.engine, max_tokens=8)
        if not stream:
            return llm.invoke(messages)
        chunks: Iterator[Any] = llm.stream(messages)
        return sum(chunks, next(chunks))


@pytest.mark.slow
class TestEmbedded(TestTiny):
    """On the embedded model."""

    @pytest.fixture
    def model(self, smollm: str, tmp_path: Path) -> Iterator[ChatRagFuse]:
        with Engine(Settings(model=smollm, store=tmp_path / "store")) as self.engine:
            yield ChatRagFuse(engine=self.engine, max_tokens=24)


del ChatModelUnitTests, ChatModelIntegrationTests
