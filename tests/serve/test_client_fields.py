"""What a client with the engine's interface asks a server for: the model's card, token ids, prompts
in parts.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.kit import PATIENCE_S, Served, said


def test_the_card_names_the_model_without_its_folder(served: Served) -> None:
    card = served.get("/v1/ragfuse/model").json()
    assert card["name"] == served.service.model
    assert "/" not in card["name"]
    assert (card["max_context"], card["has_chat_template"], card["refusal"]) == (4096, True, "")
    assert card["max_tokens"] == served.service.settings.max_tokens


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"text": "a", "messages": [said()]}, "Give either text"),
        ({"messages": [said()], "tools": [{"type": "function"}]}, "A tool must be"),
    ],
)
def test_what_has_no_tokens_is_refused(served: Served, body: Any, why: str) -> None:
    refused = served.post("/v1/ragfuse/tokens", body)
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]


def test_token_ids_come_where_they_are_asked_for(served: Served) -> None:
    wanted = {"ragfuse": {"token_ids": True}}
    whole = served.chat(**wanted).json()["choices"][0]["token_ids"]
    assert len(whole) == served.chat().json()["usage"]["completion_tokens"]
    assert "token_ids" not in served.chat().json()["choices"][0]
    body = {"model": served.service.model, "messages": [said()], "stream": True, **wanted}
    streamed = httpx.post(f"{served.url}/chat/completions", json=body, timeout=PATIENCE_S).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [
        event["choices"][0]["token_ids"] for event in events if "token_ids" in event["choices"][0]
    ] == [whole]


def test_an_answer_ends_after_its_seconds(served: Served) -> None:
    ended = served.chat(ragfuse={"max_time_s": 0.0}).json()
    assert 0 < ended["usage"]["completion_tokens"] < 12
