"""LangChain's own suites over `ragfuse serve` with the embedded model: what passes in this process passes there."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_ragfuse import ChatRagFuse
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from integrations.tests.served import KEY

PASSAGE = "The lighthouse keeper counted forty ships that night and wrote all of their names into a blue book."
ASKED = "\n\nHow many ships were there?"
DETAILS = ["cache_read_input", "cache_creation_input"]
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
class TestEmbedded(ChatModelIntegrationTests):
    """With a server, which has one model: there is no other one to ask for in a call."""

    @pytest.fixture(autouse=True, scope="class")
    def address(self, request: pytest.FixtureRequest, served_embedded: str) -> None:
        request.cls.url = served_embedded

    url: str = ADDRESS

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.url, "max_tokens": 48}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason="Where it may choose, a model this small answers in words.")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        new = f"{PASSAGE} {'So it was told later.' if stream else ''}"
        block = {"type": "text", "text": new, "extras": {"ragfuse": {"chunk": True}}}
        return self._asked([("user", [block, ASKED])], stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self._asked([("user", PASSAGE + ASKED)], stream)
        return self._asked([("user", PASSAGE + ASKED)], stream)

    def _asked(self, messages: Any, stream: bool) -> AIMessage:
        llm = ChatRagFuse(**{**self.chat_model_params, "max_tokens": 8})
        if not stream:
            return llm.invoke(messages)
        chunks = list(llm.stream(messages))
        return sum(chunks[1:], chunks[0])


del ChatModelUnitTests, ChatModelIntegrationTests
