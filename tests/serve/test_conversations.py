"""Turns of a conversation that a client names."""

from __future__ import annotations

from tests.serve.kit import Served, said


def test_a_conversation_is_gone_on_with_by_its_name(served: Served) -> None:
    first = served.chat(session_id="one", messages=[said("How many ships came?")]).json()
    second = served.chat(session_id="one", messages=[said("And then?")]).json()
    alone = served.chat(messages=[said("And then?")]).json()
    used = [told["usage"]["prompt_tokens"] for told in (first, second, alone)]
    assert used[1] > used[0] + used[2] - 4  # all that was said before, and the new question
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= used[0]


def test_a_conversation_resent_as_a_whole_is_recognised(served: Served) -> None:
    first = served.chat(session_id="two", messages=[said("How many?")]).json()
    heard = first["choices"][0]["message"]["content"]
    messages = [said("How many?"), said(heard, "assistant"), said("Sure?")]
    second = served.chat(session_id="two", messages=messages).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
