"""LangChain's own suites for chat models, on the embedded model with all that it can do switched
on.

Nothing is overridden; each skip and xfail has its reason in the package's README.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_ragfuse import ChatRagFuse
from langchain_tests.unit_tests import ChatModelUnitTests

from integrations.tests.langchain_suite import ASKED, PASSAGE, EmbeddedChatModel


class Common:
    """What the suites are told of the model."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m-reader"


class TestUnit(Common, ChatModelUnitTests):
    """What needs no weights."""

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"RAGFUSE_MODEL": "some-model"}, {}, {"model_name": "some-model"}


@pytest.mark.embedded
class TestEmbedded(Common, EmbeddedChatModel):
    """With weights, over a store of the class's own."""

    @pytest.fixture(autouse=True, scope="class")
    def store(self, smollm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAGFUSE_STORE", str(tmp_path_factory.mktemp("standard")))
            yield

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "smollm2-135m",
            "dtype": "float32",
            "max_tokens": 300,
            "frequency_penalty": 1.0,
        }

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        ChatRagFuse(**self.chat_model_params).get_engine().ingest([(PASSAGE, "log.txt")])
        return self.asked([("user", PASSAGE + ASKED)], stream)


del ChatModelUnitTests, EmbeddedChatModel
