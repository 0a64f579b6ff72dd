"""Turns of a conversation that a client names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.kits.serve import Served, said


def test_a_conversation_resent_without_its_documents_is_recognised(served: Served) -> None:
    messages, told = list[dict[str, Any]](), list[dict[str, Any]]()
    for turn, question in enumerate(
        ("Who wrote it down?", "Which colour was it?", "How many came?")
    ):
        messages.append(said(question))
        books = [
            f"Log {turn}.{n}. The pilot of berth {n} noted {turn + n} boats, and a green buoy."
            for n in range(2)
        ]
        ask: dict[str, Any] = {"session_id": "books", "messages": messages, "documents": books}
        anew = served.chat(**ask, ragfuse={"reuse": False}).json()
        answer = served.chat(**ask).json()
        assert answer["choices"][0]["message"] == anew["choices"][0]["message"]
        used, cached = (
            answer["usage"]["prompt_tokens"],
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        )
        assert used == anew["usage"]["prompt_tokens"]
        assert cached >= sum(each["usage"]["prompt_tokens"] for each in told[-1:])
        messages.append(answer["choices"][0]["message"])
        told.append(answer)
    assert (
        told[2]["usage"]["prompt_tokens"]
        > told[1]["usage"]["prompt_tokens"]
        > told[0]["usage"]["prompt_tokens"]
    )
    engine = served.engine()
    assert len(engine.sessions.show("books").turns) == 3


def test_turns_that_come_at_the_same_time_follow_each_other(served: Served) -> None:
    questions = [f"Question number {number}?" for number in range(4)]

    def ask(question: str) -> dict[str, Any]:
        answer: dict[str, Any] = served.chat(session_id="four", messages=[said(question)]).json()
        return answer

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, questions))
    engine = served.engine()
    turns = engine.sessions.show("four").turns
    assert sorted(turn.messages[0].text for turn in turns) == sorted(questions)
    lengths = sorted(answer["usage"]["prompt_tokens"] for answer in answers)
    assert lengths[0] < lengths[1] < lengths[2] < lengths[3]  # each has all that was said before it
