"""LangChain's own suites over `ragfuse serve` with the embedded model: what passes in this process
passes there.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_ragfuse import ChatRagFuse
from langchain_tests.unit_tests import ChatModelUnitTests

from integrations.tests.langchain_suite import ASKED, PASSAGE, EmbeddedChatModel
from integrations.tests.served import KEY

ADDRESS = "http://127.0.0.1:8000/v1"


class TestUnit(ChatModelUnitTests):
    """What needs no server."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": ADDRESS, "model": "smollm2-135m"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"RAGFUSE_API_KEY": KEY}, {"base_url": ADDRESS}, {"base_url": ADDRESS}


@pytest.mark.embedded
class TestEmbedded(EmbeddedChatModel):
    """With a server, which has one model: there is no other one to ask for in a call."""

    @pytest.fixture(autouse=True, scope="class")
    def address(self, request: pytest.FixtureRequest, served_embedded: str) -> None:
        request.cls.url = served_embedded

    url: str = ADDRESS

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.url, "max_tokens": 300, "frequency_penalty": 1.0}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self.asked([("user", PASSAGE + ASKED)], stream)
        return self.asked([("user", PASSAGE + ASKED)], stream)


del ChatModelUnitTests, EmbeddedChatModel
