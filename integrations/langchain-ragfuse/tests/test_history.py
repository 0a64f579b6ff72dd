"""A chain with LangChain's message history: the turns before are sent again, and found by what they say."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_ragfuse import ChatRagFuse

from ragfuse import Engine

ASKED = ("Who kept the lighthouse?", "What did he count in one night?", "And who wrote the names down?")


def reused(message: AIMessage) -> int:
    """Tokens of earlier turns that came from the store."""
    segments = message.response_metadata["ragfuse"]["segments"]
    return sum(each["n_tokens"] for each in segments if each["kind"] == "history" and each["hit"])


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory:DeprecationWarning")
def test_a_later_turn_of_a_message_history_reuses_the_turns_before(engine: Engine) -> None:
    history = InMemoryChatMessageHistory()
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer in one word."), MessagesPlaceholder("history"), ("human", "{question}")]
    )
    chain: Any = RunnableWithMessageHistory(
        prompt | ChatRagFuse(engine=engine),
        lambda: history,
        input_messages_key="question",
        history_messages_key="history",
        history_factory_config=[],
    )
    answers = [chain.invoke({"question": question}) for question in ASKED]
    tokens = [answer.usage_metadata["input_tokens"] for answer in answers]
    said = [answer.usage_metadata["output_tokens"] for answer in answers]
    assert [reused(answer) for answer in answers] == [
        0,
        *(a + b - 1 for a, b in zip(tokens[:2], said[:2], strict=True)),
    ]
    assert answers[2].usage_metadata["input_token_details"]["cache_read"] == reused(answers[2])
    full = ChatRagFuse(engine=engine, reuse=False).invoke(
        prompt.invoke({"history": history.messages[:4], "question": ASKED[2]})
    )
    if all("\ufffd" not in message.content for message in history.messages):  # else its text says other ids
        assert full.content == answers[2].content
