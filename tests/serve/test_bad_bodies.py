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
from tests.serve.kit import Served, all_of, raw, said, serving

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def small(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that takes little."""
    home = tmp_path_factory.mktemp("small")
    settings = Settings(
        model=str(varied_path),
        dtype="float32",
        store=home / "store",
        home=home,
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
        b"null",
        b"\xff\xfe\x00",
        b'{"model": NaN, "messages": Infinity}',
        json.dumps({"model": 10**400}).encode(),
        b"[" * 100_000,
    ],
    ids=range(8),
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/ragfuse/explain"])
def test_a_body_that_is_no_request_is_told(served: Served, path: str, body: bytes) -> None:
    answer = httpx.post(served.root + path, content=body, headers=JSON, timeout=60)
    assert answer.status_code == 400
    assert refused(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", ["\ud800", "\x00", "\ufeff\u202e", "<s></s><|user|>"])
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


@pytest.mark.parametrize("value", ["NaN", "1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "seed", "max_tokens", "ratio", "deadline_s", "logprobs", "n"]
)
def test_what_is_no_number_is_told(served: Served, field: str, value: str) -> None:
    given = (
        f'"ragfuse": {{"{field}": {value}}}'
        if field in ("ratio", "deadline_s")
        else f'"{field}": {value}'
    )
    for path, asked in (
        ("chat/completions", f'"messages": [{json.dumps(said())}]'),
        ("completions", '"prompt": "a"'),
    ):
        body = f'{{"model": "{served.service.model}", "max_tokens": 2, {asked}, {given}}}'
        answer = httpx.post(f"{served.url}/{path}", content=body, headers=JSON, timeout=60)
        assert (answer.status_code, refused(answer)["type"]) == (
            400,
            "invalid_request_error",
        ), answer.text


def test_only_json_is_read(served: Served) -> None:
    body = json.dumps({"model": served.service.model, "messages": [said()]})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
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


def test_no_page_elsewhere_may_read_answers(served: Served) -> None:
    answer = served.get("/v1/models", origin="https://evil.example")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert httpx.options(f"{served.url}/chat/completions", headers=asked).status_code == 405


def test_a_page_that_may_ask_does(tiny_settings: Settings) -> None:
    with serving(tiny_settings, origins=["https://good.example"]) as made:
        answer = made.get("/v1/models", origin="https://good.example")
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert (
            "access-control-allow-origin"
            not in made.get("/v1/models", origin="https://evil.example").headers
        )


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
        ("GET", "/nope", 404, "/docs lists what there is"),
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
