"""Prompts that are too long over HTTP: OpenAI's code, and what to send instead."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ragfuse.errors import OverlongError
from ragfuse.remote import RemoteEngine
from ragfuse.types.request_limits import OVERLONG
from tests.serve.kit import Served, said, serving, settings_of
from tests.tiny import CHUNKS

WINDOW = 400
LONG = {"just too long": "word " * (WINDOW // 4), "far too long": "word " * 20_000}
DROP = '"ragfuse": {"overflow": "drop"}'


@pytest.fixture(scope="module")
def narrow(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model takes few tokens."""
    home = tmp_path_factory.mktemp("narrow")
    folder = home / "narrow"
    shutil.copytree(varied_path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": WINDOW}))
    settings = settings_of(folder, home, max_tokens=4)
    with serving(settings) as served:
        yield served


def body(kind: str, text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A path and a body that asks with this text."""
    path, asked = {
        "chat": ("/v1/chat/completions", {"messages": [said(text)]}),
        "completions": ("/v1/completions", {"prompt": text}),
        "responses": ("/v1/responses", {"input": text}),
    }[kind]
    return path, {"model": "narrow", **asked, **fields}


@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
def test_a_message_that_is_too_long_alone_has_openais_code_and_no_advice_about_documents(
    narrow: Served, kind: str, length: str
) -> None:
    answer = narrow.post(*body(kind, LONG[length]))
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert (told["code"], told["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert f"takes at most {WINDOW} tokens, found" in told["message"]
    assert told["message"].endswith(" Shorten it.")


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
def test_documents_that_are_too_long_have_the_advice_that_helps(narrow: Served, kind: str) -> None:
    documents = [f"{text} ({number})" for number in range(20) for text in CHUNKS]
    path, asked = body(kind, "Who?", stream=True, documents=documents)
    answer = narrow.post(path, asked)
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert told["code"] == "context_length_exceeded"
    assert told["message"].endswith(f"{DROP}.")
    assert "overflow=" not in told["message"]
    assert narrow.post(path, {**asked, **json.loads(f"{{{DROP}}}")}).status_code == 200


def test_where_documents_are_left_out_already_no_one_is_told_to_leave_them_out(
    narrow: Served,
) -> None:
    asked = body(
        "chat", LONG["just too long"], documents=list(CHUNKS), ragfuse={"overflow": "drop"}
    )
    told = narrow.post(*asked).json()["error"]
    assert told["code"] == "context_length_exceeded"
    assert "leave" not in told["message"]


def test_clients_know_the_error_by_its_code(narrow: Served) -> None:
    client = openai.OpenAI(base_url=narrow.url, api_key="none")
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model="narrow", messages=[{"role": "user", "content": LONG["far too long"]}]
        )
    assert raised.value.code == "context_length_exceeded"
    engine = RemoteEngine(narrow.root)
    with pytest.raises(OverlongError, match="takes at most"):
        engine.answer([("user", LONG["just too long"])])
    with (
        pytest.raises(OverlongError, match="takes at most"),
        engine.stream([("user", LONG["just too long"])]) as stream,
    ):
        "".join(stream)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [said()], "max_tokens": 10**6, "stream": True}),
        ("/v1/completions", {"prompt": "Who?", "max_tokens": 10**6}),
        ("/v1/responses", {"input": "Who?", "max_output_tokens": 10**6}),
        ("/v1/ragfuse/explain", {"messages": [said()], "max_tokens": 10**6}),
    ],
)
def test_an_answer_longer_than_the_window_is_refused_with_what_fits(
    narrow: Served, path: str, fields: dict[str, Any]
) -> None:
    asked = {"model": narrow.service.model, **fields}
    told = narrow.post(path, asked)
    assert told.status_code == 400
    error = told.json()["error"]
    assert error["code"] == OVERLONG
    most = int(
        re.findall(r"Ask for at most ([0-9,]+) tokens", error["message"])[0].replace(",", "")
    )
    name = next(name for name in fields if name.startswith("max_"))
    assert narrow.post(path, {**asked, name: most + 1}).status_code == 400
    assert narrow.post(path, {**asked, name: most}).status_code == 200
