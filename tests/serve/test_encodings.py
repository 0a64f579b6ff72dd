"""Bodies in other encodings are told before anything is done, and halves of characters replaced, in whatever field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from ragfuse.serve.body import parsed
from tests.serve.kit import Served, said
from tests.tiny import CHUNKS

JSON = {"content-type": "application/json"}
HALF = b"\xed\xa0\x80"
"""Half of a surrogate pair as its own three bytes, which is no UTF-8."""
MARK = "HALF"

CHAT: Mapping[str, Any] = {"messages": [said()], "max_tokens": 2}
FIELDS = [
    ("chat/completions", {**CHAT, "messages": [said(f"Hi {MARK}")]}),
    ("chat/completions", {**CHAT, "messages": [{**said(), "name": MARK}]}),
    ("chat/completions", {**CHAT, "session_id": f"s{MARK}"}),
    ("chat/completions", {**CHAT, "documents": [{"text": CHUNKS[0], "title": f"t{MARK}"}]}),
    ("chat/completions", {**CHAT, "documents": [f"{CHUNKS[0]} {MARK}"]}),
    ("chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "description": MARK}}]}),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [MARK]}}}},
    ),
    ("chat/completions", {**CHAT, "stop": [MARK]}),
    ("chat/completions", {**CHAT, "ragfuse": {"policy": MARK}}),
    ("chat/completions", {**CHAT, "metadata": {MARK: 1}}),
    ("chat/completions", {**CHAT, MARK: 1}),
    ("chat/completions", {**CHAT, "model": MARK}),
    ("completions", {"prompt": f"hello {MARK}"}),
    ("completions", {"prompt": ["hello", MARK]}),
    ("ragfuse/explain", {"prompt": MARK}),
    ("ragfuse/schemas", {"pml": f'<schema name="{MARK}"><module name="a">hello</module></schema>'}),
]


def sent(served: Served, path: str, body: bytes) -> httpx.Response:
    return httpx.post(f"{served.url}/{path}", content=body, headers=JSON, timeout=60)


def written(served: Served, path: str, body: Mapping[str, Any]) -> bytes:
    model = {"model": served.service.model} if path.endswith("completions") else {}
    return json.dumps({**model, **body}).encode()


@pytest.mark.parametrize(("path", "body"), FIELDS, ids=range(len(FIELDS)))
@pytest.mark.parametrize("half", [HALF, b"\xc0\xaf", b"\xff", b"\xf5\x80\x80\x80"])
def test_what_is_no_utf_8_is_told_in_whatever_field_it_stands(
    served: Served, path: str, body: Mapping[str, Any], half: bytes
) -> None:
    answer = sent(served, path, written(served, path, body).replace(MARK.encode(), half))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "encoding"


@pytest.mark.parametrize(("path", "body"), FIELDS, ids=range(len(FIELDS)))
@pytest.mark.parametrize("odd", [b"\\ud800", b"\\uDBFF", b"\\u0000"])
def test_an_escape_of_half_a_character_or_nul_is_answered_as_the_sign_that_replaces_it(
    served: Served, path: str, body: Mapping[str, Any], odd: bytes
) -> None:
    answers = [
        sent(served, path, written(served, path, body).replace(MARK.encode(), each)) for each in (odd, b"\\ufffd")
    ]
    assert len({answer.status_code for answer in answers}) == 1
    told = [answer.json() for answer in answers]
    if answers[0].status_code == 400:
        assert told[0] == told[1]
        assert told[0]["error"]["code"] not in ("half", "encoding")
    elif "choices" in told[0] and "session_id" not in body:  # there the second answer has the first one before it
        assert told[0]["choices"] == told[1]["choices"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "cp500"])
@pytest.mark.parametrize("text", ["Hi", "\u0122", "Hi \\ud800"])
def test_a_body_in_another_encoding_is_told(served: Served, encoding: str, text: str) -> None:
    body = {"model": served.service.model, **CHAT, "messages": [said(text)]}
    told = json.dumps(body, ensure_ascii=False).replace("\\\\u", "\\u").encode(encoding, "replace")
    answer = sent(served, "chat/completions", told)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("depth", [100, 2000, 80_000])  # more would be too long in UTF-16 once a model is loaded
def test_no_encoding_hides_the_depth_of_a_body(served: Served, depth: int) -> None:
    """A letter whose second byte in UTF-16 is a quote would open a text for whoever looks at bytes."""
    body = f'{{"model":"m","prompt":"\u0122","metadata":{{"a":{"[" * depth}1{"]" * depth}}}}}'
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        assert sent(served, "completions", body.encode(encoding)).status_code == 400


def test_whole_pairs_and_a_byte_order_mark_are_taken(served: Served) -> None:
    for text in ("\U0001f600", "ü", "\\\\ud800"):
        for is_ascii in (True, False):
            body = {"model": served.service.model, **CHAT, "messages": [said(text)]}
            told = json.dumps(body, ensure_ascii=is_ascii).encode()
            assert sent(served, "chat/completions", told).status_code == 200
            assert sent(served, "chat/completions", b"\xef\xbb\xbf" + told).status_code == 200


def test_what_is_parsed_is_the_text_that_was_checked() -> None:
    assert parsed(b'{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}
    assert parsed(b'["\\ud83d", {"\\ude00": 1}, [["\\uDE00\\ud83d", "\\u0000"]]]') == [
        "\ufffd",
        {"\ufffd": 1},
        [["\ufffd\ufffd", "\ufffd"]],
    ]


def test_a_title_that_is_refused_leaves_its_chunk_as_it_was(served: Served) -> None:
    body = {**CHAT, "documents": [{"text": CHUNKS[4], "title": MARK}]}
    told = written(served, "chat/completions", body).replace(MARK.encode(), HALF)
    assert sent(served, "chat/completions", told).status_code == 400
    served.service.engine(served.service.keys.tenants[0]).flush()
    for fields in ({}, {"documents": [{"text": CHUNKS[4], "title": "whole"}]}):
        answer = served.chat(messages=[said(f"{CHUNKS[4]}\n\nWho?")], max_tokens=2, **fields)
        assert answer.status_code == 200
