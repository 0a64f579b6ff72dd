"""A chain with LangChain's message history: the turns before are sent again, and found by what they say."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_ragfuse import ChatRagFuse

from ragfuse import Ask, Engine

ASKED = ("Who kept the lighthouse?", "What did he count in one night?", "And who wrote the names down?")


def reused(message: AIMessage) -> int:
    """Tokens of earlier turns that came from the store."""
    segments = message.response_metadata["ragfuse"]["segments"]
    return sum(each["n_tokens"] for each in segments if each["kind"] == "history" and each["hit"])


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory:DeprecationWarning")
def test_a_later_turn_of_a_message_history_reuses_the_turns_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, read = engine._planner.plan, list[tuple[int, ...]]()
    monkeypatch.setattr(engine._planner, "plan", lambda *given: read.append(given[0].token_ids) or plan(*given))
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
    # Over the ids that were read: a random model writes bytes that are no text, and their text would be other ids.
    assert engine.answer(list(read[2]), Ask(reuse=False)).text == answers[2].content
