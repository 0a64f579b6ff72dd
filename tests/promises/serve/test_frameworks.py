"""LangChain's and LlamaIndex's clients for OpenAI, as they are, against a server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.serve import Served

FIELDS = {"api_key": "none", "max_retries": 0, "timeout": 60}


@pytest.fixture
def chat(served: Served) -> Any:
    langchain_openai = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed"
    )
    return langchain_openai.ChatOpenAI(
        model=served.service.model, base_url=served.url, stream_usage=True, temperature=0, **FIELDS
    )


@pytest.fixture
def like(served: Served) -> Any:
    made = pytest.importorskip(
        "llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed"
    )
    return lambda **told: made.OpenAILike(
        model=served.service.model,
        api_base=served.url,
        context_window=4096,
        **{"max_tokens": 12, "temperature": 0.0, **FIELDS, **told},
    )


def test_langchain_chats_streams_and_counts(chat: Any) -> None:
    whole = chat.invoke("Who?")
    assert len(whole.content) == 12
    assert whole.usage_metadata["output_tokens"] == 12
    chunks = list(chat.stream("Who?"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert (
        sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata)
        == (whole.usage_metadata["total_tokens"])
    )


def test_langchain_calls_tools_and_answers_by_a_schema(chat: Any) -> None:
    from pydantic import BaseModel

    class Door(BaseModel):
        """A door."""

        hue: bool

    roomy = chat.model_copy(update={"max_tokens": 200})
    call = roomy.bind_tools([Door], tool_choice="required").invoke("Which?").tool_calls[0]
    assert (call["name"], set(call["args"])) == ("Door", {"hue"})
    assert isinstance(
        roomy.with_structured_output(Door, method="json_schema").invoke("Which?"), Door
    )


@pytest.mark.parametrize("chats", [True, False])
def test_llama_index_completes_and_streams(like: Any, chats: bool) -> None:
    llm = like(is_chat_model=chats)
    whole = llm.complete("Who?").text
    assert len(whole) == 12
    assert [each.text for each in llm.stream_complete("Who?")][-1] == whole
