"""Bodies that are no request: broken, huge, deep, of another type, of another's page; each is told,
none is a crash.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ragfuse import Settings
from tests.serve.kit import Served, all_of, raw, said, serving, settings_of

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def small(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that takes little."""
    home = tmp_path_factory.mktemp("small")
    settings = settings_of(
        varied_path,
        home,
        max_tokens=4,
        serve_body_bytes=20_000,
    )
    with serving(settings) as made:
        yield made


def refused(answer: httpx.Response) -> dict[str, object]:
    """What is said, in OpenAI's form."""
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert "Traceback" not in told["message"]
    return dict(told)


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
def test_a_body_that_is_no_request_is_told(served: Served, body: bytes) -> None:
    answer = httpx.post(f"{served.url}/chat/completions", content=body, headers=JSON, timeout=60)
    assert answer.status_code == 400
    assert refused(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", ["\ud800", "<s></s><|user|>"])
def test_strange_text_is_answered_or_told_wherever_it_stands(served: Served, text: str) -> None:
    for fields in (
        {"messages": [said(text)]},
        {"documents": [text * 40]},
        {"stop": [text]},
        {"session_id": text},
        {"tools": [{"type": "function", "function": {"name": "a", "description": text}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [text]}}}},
    ):
        body = json.dumps(
            {"model": served.service.model, "messages": [said()], "max_tokens": 3, **fields}
        )
        answer = httpx.post(
            f"{served.url}/chat/completions", content=body, headers=JSON, timeout=60
        )
        assert answer.status_code in (200, 400), (fields, answer.text)


def test_a_body_that_is_too_large_is_told_before_it_is_read(small: Served) -> None:
    with raw(small.port) as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type:"
            b" application/json\r\ncontent-length: 99999999999\r\n\r\n{"
        )
        assert b" 413 " in all_of(line).splitlines()[0]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_hears_why(small: Served, chunked: bool) -> None:
    content = b'{"model": "' + b"x" * 50_000 + b'"}'
    body = (content[at : at + 999] for at in range(0, len(content), 999)) if chunked else content
    answer = httpx.post(f"{small.url}/completions", content=body, headers=JSON, timeout=60)
    assert answer.status_code == 413
    assert "20,000 bytes" in str(refused(answer)["message"])
    assert small.get("/health").status_code == 200


def test_only_json_is_read(served: Served) -> None:
    body = json.dumps({"model": served.service.model, "messages": [said()]})
    for kind in ("text/plain", ""):
        answer = httpx.post(
            f"{served.url}/chat/completions",
            content=body,
            headers={"content-type": kind},
            timeout=60,
        )
        assert (answer.status_code, refused(answer)["code"]) == (415, "content_type")


def test_a_page_elsewhere_reaches_no_server_by_a_name_of_its_own(served: Served) -> None:
    answer = served.get("/v1/models", host="evil.example:8000")
    assert (answer.status_code, refused(answer)["code"]) == (421, "host")
    assert served.get("/v1/models", host="localhost:1").status_code == 200
    assert served.get("/v1/models", host="[::1]:1").status_code == 200


def test_a_monitor_that_names_no_host_is_answered(served: Served) -> None:
    with raw(served.port) as line:
        line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in all_of(line).splitlines()[0]
    for host in (b"", b"evil.example"):
        with raw(served.port) as line:
            line.sendall(b"GET /health HTTP/1.0\r\nhost: " + host + b"\r\n\r\n")
            assert b" 421 " in all_of(line).splitlines()[0]


def test_a_page_elsewhere_reads_answers_where_it_is_named_alone(
    served: Served, tiny_settings: Settings
) -> None:
    evil, good = "https://evil.example", "https://good.example"
    with serving(tiny_settings, origins=[good]) as made:
        for server, origin, told in ((served, evil, None), (made, evil, None), (made, good, good)):
            answer = server.get("/v1/models", origin=origin)
            assert answer.headers.get("access-control-allow-origin") == told


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
        ("POST", "/chat/completions", 404, "/docs"),
    ],
)
def test_paths_and_methods_that_are_none_are_told(
    served: Served, method: str, path: str, status: int, said: str
) -> None:
    answer = httpx.request(method, served.root + path, json={} if method == "POST" else None)
    assert answer.status_code == status
    assert refused(answer)["code"] == "http"
    assert said in refused(answer)["message"]
