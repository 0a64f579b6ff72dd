"""What LangChain's suite for chat models is told of ragfuse with the embedded model, in this
process or at a server.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_ragfuse import ChatRagFuse
from langchain_tests.integration_tests import ChatModelIntegrationTests

PASSAGE = (
    "The lighthouse keeper counted forty ships that night and wrote all of their names into a blue"
    " book."
)
ASKED = "\n\nHow many ships were there?"
DETAILS = ["cache_read_input", "cache_creation_input"]


class EmbeddedChatModel(ChatModelIntegrationTests):
    """The suite over a `ChatRagFuse`, whose parameters are the subclass's matter."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatRagFuse

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
        return self.asked([("user", [block, ASKED])], stream)

    def asked(self, messages: Any, stream: bool) -> AIMessage:
        """Return the answer to messages, streamed or not."""
        llm = ChatRagFuse(**{**self.chat_model_params, "max_tokens": 8})
        if not stream:
            return llm.invoke(messages)
        chunks = list(llm.stream(messages))
        return sum(chunks[1:], chunks[0])
