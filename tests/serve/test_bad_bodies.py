"""Bodies that are no request: broken, huge, deep, of another type, of another's page; each is told, none is a crash."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st

from ragfuse import Settings
from ragfuse.serve import body as bodies
from ragfuse.serve.body import MAX_BODY_DEPTH, MAX_COMMAS, MAX_MARKS, check_shape, read_as
from ragfuse.serve.guard import Guard
from ragfuse.serve.keys import Keys
from ragfuse.serve.refusals import APIError
from ragfuse.serve.schema import ChatRequest
from tests.serve.kit import Served, all_of, raw, said, serving

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def small(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that takes little."""
    home = tmp_path_factory.mktemp("small")
    settings = Settings(
        model=str(varied_path), dtype="float32", store=home / "store", home=home, max_tokens=4, serve_body_bytes=20_000
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
        b"nothing",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe\x00",
        b'{"model": NaN, "messages": Infinity}',
        b'{"model": 1e999, "messages": []}',
        json.dumps({"model": 10**400}).encode(),
        b"[" * (MAX_BODY_DEPTH - 1) + b"]" * (MAX_BODY_DEPTH - 1),
    ],
    ids=range(11),
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
        body = json.dumps({"model": served.service.model, "messages": [said()], "max_tokens": 3, **fields})
        answer = httpx.post(f"{served.url}/chat/completions", content=body, headers=JSON, timeout=60)
        assert answer.status_code in (200, 400), (fields, answer.text)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (JSON, b"{" + b" " * 200 + b"}", 413),
        ({}, b"{}", 415),
    ],
)
async def test_who_sent_all_of_a_body_is_told_at_once(headers: dict[str, str], body: bytes, status: int) -> None:
    """Nobody waits for what is left of a body that came as a whole."""
    coming, said = [{"type": "http.request", "body": body, "more_body": False}], list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return coming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    guard = Guard(said.append, Keys(), lambda path: 100, 60.0, lambda: False, lambda path, status: None, False)
    await guard({"type": "http", "method": "POST", "path": "/v1/completions", "headers": sent}, receive, send)
    assert [message.get("status") for message in said] == [status, None]


def test_a_body_that_is_too_large_is_told_before_it_is_read(small: Served) -> None:
    with raw(small.port) as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999999\r\n\r\n{"
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


def test_json_that_is_too_deep_is_told(served: Served) -> None:
    deep = b'{"model": "x", "prompt": ' + b"[" * 100_000
    answer = httpx.post(f"{served.url}/completions", content=deep, headers=JSON, timeout=60)
    assert (answer.status_code, refused(answer)["code"]) == (400, "too_deep")


def test_depth_counts_what_is_open_and_nothing_in_texts() -> None:
    check_shape(b'{"a": "' + b"[" * 1000 + b'\\"[[["}' + b"[{}]" * 1000)
    check_shape(b"[" * MAX_BODY_DEPTH)
    with pytest.raises(APIError, match="levels"):
        check_shape(b'["\\\\",' + b"{" * MAX_BODY_DEPTH)


@pytest.mark.parametrize("one", ["[],", "{},", '"",', '"\\"",', "0,"])
def test_a_body_of_very_many_values_is_told_before_it_is_parsed(served: Served, one: str) -> None:
    """Each would be an object of the interpreter's: megabytes become gigabytes, and nobody is served meanwhile."""
    most = MAX_COMMAS if one == "0," else MAX_MARKS
    check_shape(f"[{one * (most - 1)}0]".encode())
    body = f'{{"model": "m", "prompt": "a", "metadata": {{"a": [{one * (most + 1)}0]}}}}'
    with pytest.raises(APIError, match="too much"):
        check_shape(body.encode())
    answer = httpx.post(f"{served.url}/completions", content=body, headers=JSON, timeout=60)
    large = len(body) > served.service.body_bytes
    assert (answer.status_code, refused(answer)["code"]) == ((413, "too_large") if large else (400, "too_many"))


def shape(text: str) -> tuple[int, int, int]:
    """Deepest level, texts with objects and lists, commas: one character after the other, up to where JSON ends."""
    depth = deepest = marks = commas = 0
    in_text = is_escaped = False
    for sign in text:
        if in_text:
            in_text, is_escaped = is_escaped or sign != '"', not is_escaped and sign == "\\"
            continue
        if sign == "\\":
            break
        marks += sign in '"[{'
        commas += sign == ","
        depth += 1 if sign in "[{" else -1 if sign in "]}" else 0
        deepest, in_text = max(deepest, depth), sign == '"'
    return deepest, marks, commas


@given(st.text('ab"\\[]{},é', max_size=60), st.integers(1, 5))
def test_the_shape_is_that_of_reading_sign_by_sign_however_it_is_cut(text: str, step: int) -> None:
    in_texts = re.compile(r'[^"\\]*("([^"\\]|\\.)*("|\Z|\\\Z)[^"\\]*)*', re.DOTALL)
    text = in_texts.match(text)[0]  # a backslash elsewhere ends what JSON can be
    for limits in ((3, 100, 100), (100, 4, 100), (100, 100, 4)):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in zip(
                ("SCAN_NBYTES", "MAX_BODY_DEPTH", "MAX_MARKS", "MAX_COMMAS"), (step, *limits), strict=True
            ):
                patch.setattr(f"ragfuse.serve.body.{name}", value)
            try:
                check_shape(text.encode())
                is_refused = False
            except APIError:
                is_refused = True
        assert is_refused == any(found > most for found, most in zip(shape(text), limits, strict=True))


@pytest.mark.parametrize("end", ["", '"', "\\", '"]'])
@pytest.mark.parametrize("piece", ['\\"', '\\\\\\"', '[\\"', "\\u0022"])
def test_every_sign_of_a_hostile_text_is_looked_at_once(piece: str, end: str) -> None:
    """Reading it again from every quote on, as a text that does not end invites to, would take hours."""
    body, looked = ('["' + piece * ((1 << 20) // len(piece)) + end).encode(), 0
    quotes = bodies._quotes

    def counted(step: Any, is_escaped: bool) -> Any:
        nonlocal looked
        looked += len(step)
        return quotes(step, is_escaped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragfuse.serve.body._quotes", counted)
        check_shape(body)
    assert looked == len(body)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "seed", "max_tokens", "ratio", "deadline_s", "logprobs", "n"]
)
def test_what_is_no_number_is_told(served: Served, field: str, value: str) -> None:
    given = f'"ragfuse": {{"{field}": {value}}}' if field in ("ratio", "deadline_s") else f'"{field}": {value}'
    for path, asked in (("chat/completions", f'"messages": [{json.dumps(said())}]'), ("completions", '"prompt": "a"')):
        body = f'{{"model": "{served.service.model}", "max_tokens": 2, {asked}, {given}}}'
        answer = httpx.post(f"{served.url}/{path}", content=body, headers=JSON, timeout=60)
        assert (answer.status_code, refused(answer)["type"]) == (400, "invalid_request_error"), answer.text


def test_only_json_is_read(served: Served) -> None:
    body = json.dumps({"model": served.service.model, "messages": [said()]})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = httpx.post(f"{served.url}/chat/completions", content=body, headers={"content-type": kind}, timeout=60)
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


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/health", "/metrics", "/v1/models", "/v1/models/none", "/v1/ragfuse/live"]
)
def test_head_is_answered_as_get_without_a_body(served: Served, path: str) -> None:
    head, get = (httpx.request(method, served.root + path, timeout=60) for method in ("HEAD", "GET"))
    assert (head.status_code, head.headers["content-type"]) == (get.status_code, get.headers["content-type"])
    assert head.content == b""
    assert get.content
    assert httpx.head(f"{served.url}/completions").status_code == 405
    assert httpx.head(f"{served.root}/none").status_code == 404


def test_no_page_elsewhere_may_read_answers(served: Served) -> None:
    answer = served.get("/v1/models", origin="https://evil.example")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert httpx.options(f"{served.url}/chat/completions", headers=asked).status_code == 405


def test_a_page_that_may_ask_does(tiny_settings: Settings) -> None:
    with serving(tiny_settings, origins=["https://good.example"]) as made:
        answer = made.get("/v1/models", origin="https://good.example")
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "access-control-allow-origin" not in made.get("/v1/models", origin="https://evil.example").headers


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/completions", 405, "Wanted POST at /v1/completions, found GET."),
        ("GET", "/nope", 404, "There is nothing at /nope. /docs lists what there is"),
        ("POST", "/chat/completions", 404, "OpenAI's API is below /v1"),
    ],
)
def test_paths_and_methods_that_are_none_are_told(
    served: Served, method: str, path: str, status: int, said: str
) -> None:
    answer = httpx.request(method, served.root + path, json={} if method == "POST" else None)
    assert answer.status_code == status
    assert refused(answer)["code"] == "http"
    assert said in refused(answer)["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/ragfuse/documents/search", "POST"),
        ("DELETE", "/v1/ragfuse/documents/search", "POST"),
        ("GET", "/v1/ragfuse/entries/pin", "POST"),
        ("PUT", "/v1/ragfuse/documents", "GET, HEAD, POST"),
        ("PATCH", "/v1/ragfuse/documents/doc_1", "DELETE, GET, HEAD"),
        ("PUT", "/v1/ragfuse/entries", "DELETE, GET, HEAD"),
        ("PUT", "/v1/ragfuse/schemas", "GET, HEAD, POST"),
        ("POST", "/v1/ragfuse/schemas/a/b", "DELETE, GET, HEAD"),
        ("GET", "/v1/ragfuse/sessions/a", "DELETE"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_all_methods_of_a_path_are_named(served: Served, method: str, path: str, allowed: str) -> None:
    answer = httpx.request(method, served.root + path, json={})
    assert (answer.status_code, answer.headers.get_list("allow")) == (405, [allowed])
    wanted = allowed.replace(", ", " or ")
    assert refused(answer)["message"] == f"Wanted {wanted} at {path}, found {method}."


def test_what_is_no_http_ends_the_connection_and_nothing_else(served: Served) -> None:
    with raw(served.port) as line:
        line.sendall(b"\x16\x03\x01\x00 hello\r\n\r\n")
        assert b" 400 " in all_of(line).splitlines()[0]
    assert served.get("/health").status_code == 200


@pytest.mark.parametrize("field", ["messages", "documents", "content", "tool_calls"])
def test_of_many_bad_items_the_first_is_told(field: str) -> None:
    """Not all of them: that would take longer than the request."""
    bad: list[Any] = [[]] * 1000
    message = {"role": "assistant", field: bad}
    body = {"model": "m", "messages": [message]} if field in ("content", "tool_calls") else {"model": "m", field: bad}
    with pytest.raises(RequestValidationError) as raised:
        read_as(ChatRequest, json.dumps({"messages": [said()], **body}).encode())
    assert len(raised.value.errors()) <= 4


def test_what_can_never_fit_the_model_is_told_before_it_is_searched_or_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.service.engine(served.service.keys.tenants[0])
    longest, most = engine.model.max_context, served.service.body_bytes
    assert longest is not None
    assert longest < most < 4 << 20
    looked: list[int] = []
    monkeypatch.setattr(engine._stages.prompts, "pieces", lambda content, digest: looked.append(len(content)))
    text = "a b " * (longest * 3)
    for path, fields in (
        ("/v1/chat/completions", {"messages": [said(text)]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/ragfuse/explain", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [said()], "documents": [text]}),
    ):
        model = {} if "explain" in path else {"model": served.service.model}
        answer = served.post(path, {**model, **fields})
        assert answer.status_code == 400
        assert f"at most {longest:,} tokens" in str(refused(answer)["message"])
    assert looked == []
    monkeypatch.undo()
    tokenised: list[int] = []
    real = engine.model.tokens
    monkeypatch.setattr(
        engine.model, "tokens", lambda text, *special, **told: (tokenised.append(len(text)), real(text, *special))[1]
    )
    blank = "\n" * (longest * 20)
    for path, fields in (
        ("/v1/chat/completions", {"messages": [said(blank + "Who?")]}),
        ("/v1/completions", {"prompt": blank}),
    ):
        answer = served.post(path, {"model": served.service.model, **fields})
        assert answer.status_code == 400, answer.text
        assert max(tokenised, default=0) < longest
    answer = served.post("/v1/completions", {"model": served.service.model, "prompt": "a" * most})
    assert (answer.status_code, refused(answer)["code"]) == (413, "too_large")


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "zstd", "identity, gzip"])
def test_a_compressed_body_is_told_by_its_coding(served: Served, coding: str) -> None:
    body = gzip.compress(json.dumps({"model": served.service.model, "messages": [said()]}).encode())
    headers = {**JSON, "content-encoding": coding}
    answer = httpx.post(f"{served.url}/chat/completions", content=body, headers=headers, timeout=60)
    assert (answer.status_code, refused(answer)["code"]) == (415, "content_encoding")
    assert f"found Content-Encoding: {coding.split()[-1]}. Send the JSON itself" in str(refused(answer)["message"])


def test_a_body_may_be_said_to_be_as_it_is(served: Served) -> None:
    body = json.dumps({"model": served.service.model, "messages": [said()], "max_tokens": 1})
    headers = {**JSON, "content-encoding": "identity"}
    assert httpx.post(f"{served.url}/chat/completions", content=body, headers=headers, timeout=60).status_code == 200
