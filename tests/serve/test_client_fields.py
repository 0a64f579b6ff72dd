"""What a client with the engine's interface asks a server for: the model's card, token ids, prompts
in parts.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.kit import TOOL, Served, events, refused, said


def test_the_card_names_the_model_without_its_folder(served: Served) -> None:
    card = served.get("/v1/ragfuse/model").json()
    assert card["name"] == served.service.model
    assert "/" not in card["name"]
    assert (card["max_context"], card["has_chat_template"], card["refusal"]) == (4096, True, "")
    assert card["max_tokens"] == served.service.settings.max_tokens


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a", "messages": [said()]},
        {"messages": [said()], "tools": [{"type": "function", "parameters": TOOL}]},
    ],
)
def test_what_has_no_tokens_is_refused(served: Served, body: Any) -> None:
    refused(served.post("/v1/ragfuse/tokens", body))


def test_token_ids_come_where_they_are_asked_for(served: Served) -> None:
    wanted = {"ragfuse": {"token_ids": True}}
    whole = served.chat(**wanted).json()["choices"][0]["token_ids"]
    plain = served.chat().json()
    assert len(whole) == plain["usage"]["completion_tokens"]
    assert "token_ids" not in plain["choices"][0]
    streamed = [event["choices"][0] for event in events(served.chat(stream=True, **wanted))]
    assert [each["token_ids"] for each in streamed if "token_ids" in each] == [whole]


def test_an_answer_ends_after_its_seconds(served: Served) -> None:
    ended = served.chat(ragfuse={"max_time_s": 0.0}).json()
    assert 0 < ended["usage"]["completion_tokens"] < 12
