"""Prompts that are too long over HTTP: OpenAI's code, and what to send instead."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from ragfuse.errors import OverlongError
from ragfuse.remote import RemoteEngine
from ragfuse.types.prompt import OVERLONG
from tests.kits.serve import CHAT, TEXT, Served, client_of, refused, said

WINDOW = 400
JUST, FAR = "word " * (WINDOW // 4), "word " * 20_000
KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    CHAT: lambda text: {"messages": [said(text)]},
    TEXT: lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
}


@pytest.fixture(scope="module")
def narrow(
    make_server: Callable[..., Served], varied_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """A server whose model takes few tokens."""
    folder = tmp_path_factory.mktemp("narrow") / "narrow"
    shutil.copytree(varied_path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": WINDOW}))
    return make_server(model=folder, max_tokens=4)


def body(path: str, text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A path and a body that asks with this text."""
    return path, {"model": "narrow", **KINDS[path](text), **fields}


@pytest.mark.parametrize("text", [JUST, FAR], ids=["just", "far"])
@pytest.mark.parametrize("path", KINDS)
def test_a_message_that_is_too_long_alone_has_openais_code(
    narrow: Served, path: str, text: str
) -> None:
    told = refused(narrow.post(*body(path, text)))
    assert (told["code"], told["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert f"at most {WINDOW} tokens" in told["message"]


def test_clients_know_the_error_by_its_code(narrow: Served) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client_of(narrow).chat(FAR)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(OverlongError):
        RemoteEngine(narrow.root).answer([("user", JUST)])


@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        (CHAT, "max_tokens", {"messages": [said()], "stream": True}),
        ("/v1/responses", "max_output_tokens", {"input": "Who?"}),
        ("/v1/ragfuse/explain", "max_tokens", {"messages": [said()]}),
    ],
)
def test_an_answer_longer_than_the_window_is_refused_with_what_fits(
    narrow: Served, path: str, name: str, fields: dict[str, Any]
) -> None:
    asked = {"model": "narrow", **fields}
    told = refused(narrow.post(path, {**asked, name: 10**6}))
    assert told["code"] == OVERLONG
    most = int(re.findall(r"at most ([0-9,]+) tokens", told["message"])[-1].replace(",", ""))
    assert narrow.post(path, {**asked, name: most + 1}).status_code == 400
    assert narrow.post(path, {**asked, name: most}).status_code == 200
