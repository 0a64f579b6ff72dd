"""Bodies that are no request: broken, huge, deep, of another type, of another's page; each is told,
none is a crash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from ragfuse import Settings
from tests.kits.serve import CHAT, Served, all_of, raw, refused, said, send, serving


@pytest.fixture(scope="module")
def small(make_server: Callable[..., Served]) -> Served:
    """A server that takes little."""
    return make_server(max_tokens=4, serve_body_bytes=20_000)


def posted(
    served: Served, content: bytes | Iterator[bytes], kind: str = "application/json"
) -> httpx.Response:
    told = {"content-type": kind}
    return httpx.post(f"{served.root}{CHAT}", content=content, headers=told, timeout=60)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe\x00",
        b'{"model": "m", "messages": [], "temperature": 1e999}',
        b"[" * 100_000,
    ],
    ids=range(6),
)
def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    assert refused(posted(served, body))["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", ["\ud800", "<s></s><|user|>"])
def test_strange_text_is_answered_or_refused_wherever_it_stands(served: Served, text: str) -> None:
    fields: dict[str, Any]
    for fields in (
        {"messages": [said(text)]},
        {"documents": [text * 40]},
        {"stop": [text]},
        {"session_id": text},
        {"tools": [{"type": "function", "function": {"name": "a", "description": text}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [text]}}}},
    ):
        body = {"model": served.service.model, "messages": [said()], "max_tokens": 3, **fields}
        answer = posted(served, json.dumps(body).encode())
        assert answer.status_code in (200, 400), (fields, answer.text)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(small: Served) -> None:
    with raw(small.port) as line:
        send(line, CHAT, "{", **{"content-length": 99999999999})
        assert b" 413 " in all_of(line).splitlines()[0]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_hears_why(small: Served, chunked: bool) -> None:
    content = b'{"model": "' + b"x" * 50_000 + b'"}'
    pieces = (content[at : at + 999] for at in range(0, len(content), 999))
    assert "20,000 bytes" in refused(posted(small, pieces if chunked else content), 413)["message"]
    assert small.get("/health").status_code == 200


def test_only_json_is_read(served: Served) -> None:
    assert refused(posted(served, b"{}", "text/plain"), 415)["code"] == "content_type"


def test_a_page_elsewhere_reaches_no_server_by_a_name_of_its_own(served: Served) -> None:
    assert refused(served.get("/v1/models", host="evil.example:8000"), 421)["code"] == "host"
    for host in ("localhost:1", "[::1]:1"):
        assert served.get("/v1/models", host=host).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"), [(b"", 200), (b"host: \r\n", 421), (b"host: evil.example\r\n", 421)]
)
def test_a_monitor_that_names_no_host_is_answered(served: Served, host: bytes, status: int) -> None:
    with raw(served.port) as line:
        line.sendall(b"GET /health HTTP/1.0\r\n" + host + b"\r\n")
        assert f" {status} ".encode() in all_of(line).splitlines()[0]


def test_a_page_elsewhere_reads_answers_where_it_is_named_alone(
    served: Served, tiny_settings: Settings
) -> None:
    evil, good = "https://evil.example", "https://good.example"
    with serving(tiny_settings, origins=[good]) as made:
        for server, origin, told in ((served, evil, None), (made, evil, None), (made, good, good)):
            answer = server.get("/v1/models", origin=origin)
            assert answer.headers.get("access-control-allow-origin") == told
