"""Servers that are not there, want another key, are something else, break off, or send what nobody
should believe.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ragfuse import Ask, ChatMessage, InputError, SettingsError
from ragfuse.remote import BusyError, RemoteEngine, ServerError, connection
from tests.kits.serve import Served

CARD = {
    "object": "ragfuse.model",
    "name": "tiny",
    "max_context": 64,
    "has_chat_template": True,
    "max_tokens": 8,
    "refusal": "",
}
TRACE = {"model": "tiny", "tokens": 3, "tokens_fresh": 3, "segments": []}
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
SECRET = "a-key-that-nobody-may-read"


def reply(
    body: Any, status: str = "200 OK", kind: str = "application/json", more: str = ""
) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}\r\nconnection:"
        f" close\r\n{more}\r\n"
    )
    return head.encode() + raw


def event(choice: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def said(text: Any = "Hi", **choice: Any) -> bytes:
    return event({"index": 0, "delta": {"content": text}, "finish_reason": None, **choice})


def end(reason: Any = "stop", trace: Any = TRACE, **choice: Any) -> bytes:
    return event(
        {"index": 0, "delta": {}, "finish_reason": reason, "token_ids": [1, 2], **choice},
        ragfuse=trace,
    )


DONE = b"data: [DONE]\n\n"


@contextmanager
def listening(*replies: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server of these replies, one a connection; the last one again and again. Yields its address
    and what came.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def answer() -> None:
        for number in range(1000):
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                seen.append(_request(line))
                try:
                    line.sendall(replies[min(number, len(replies) - 1)])
                except OSError:
                    continue

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def _request(line: socket.socket) -> bytes:
    raw = b""
    while b"\r\n\r\n" not in raw:
        piece = line.recv(1 << 16)
        if not piece:
            return raw
        raw += piece
    head, _, body = raw.partition(b"\r\n\r\n")
    length = next(
        (
            int(x.split(b":")[1])
            for x in head.lower().split(b"\r\n")
            if x.startswith(b"content-length")
        ),
        0,
    )
    while len(body) < length:
        body += line.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def ask(url: str, **more: Any) -> Any:
    return RemoteEngine(url, SECRET, **{"max_retries": 0, **more}).answer(
        [ChatMessage("user", "Who?")], Ask()
    )


def test_a_proxy_of_the_environment_is_never_asked_for_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with listening(reply(b"<html>", "403 Forbidden", "text/html")) as (proxy, asked):
        monkeypatch.setenv("HTTP_PROXY", proxy.replace("//", "//user:word@"))
        for host in ("127.0.0.1", "localhost"):
            with listening(reply(CARD), STREAM + said("Hello") + end() + DONE) as (url, _):
                assert ask(url.replace("127.0.0.1", host)).text == "Hello"
        assert asked == []
        with pytest.raises(ServerError, match="is not ragfuse") as caught:
            ask("http://server.invalid:8000")
        assert "word" not in str(caught.value)
        assert len(asked) == 1


def test_a_server_that_is_not_there_is_named_with_its_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServerError, match=f"127.0.0.1:{port}/v1.*ragfuse serve") as caught:
        ask(f"http://127.0.0.1:{port}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", ["", "another-key-than-theirs"])
def test_a_wrong_key_is_named_as_such_and_not_printed(served: Served, key: str) -> None:
    with pytest.raises(ServerError, match="api_key=") as caught:
        RemoteEngine(served.root, key, max_retries=0).answer("Who?")
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    "answered",
    [
        reply(b"<html>hello</html>", kind="text/html"),
        reply({**CARD, "max_context": "many"}),
        reply({"error": {"message": "Unknown path.", "type": "not_found_error"}}, "404 Not Found"),
    ],
)
def test_a_server_that_is_not_ragfuse_is_named_as_such(answered: bytes) -> None:
    with (
        listening(answered) as (url, _),
        pytest.raises(ServerError, match="ragfuse"),
    ):
        ask(url)


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {not json}\n\n",
        said(7),
        event(
            {"index": 0, "delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}}
        ),
        end(trace={**TRACE, "segments": [{"kind": "strange"}]}),
        said() + DONE,
    ],
)
def test_an_event_of_a_wrong_form_is_an_error_and_no_answer(stream: bytes) -> None:
    with (
        listening(reply(CARD), STREAM + stream + DONE) as (url, _),
        pytest.raises(ServerError, match="Check"),
    ):
        ask(url)


def busy(status: str, more: str = "") -> bytes:
    return reply(
        {"error": {"message": "Too many wait.", "type": "rate_limit_error", "code": "busy"}},
        status,
        more=more,
    )


def test_a_busy_server_is_asked_again_after_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_WAIT_S", 0.01)
    good = STREAM + said() + end() + DONE
    refused = [busy("429 Too Many", "retry-after: 30\r\n"), busy("503 Unavailable")]
    with listening(reply(CARD), *refused, good) as (url, seen):
        assert ask(url, max_retries=2).text == "Hi"
    assert len(seen) == 4
    with listening(reply(CARD), busy("429 Too Many", "retry-after: 30\r\n")) as (url, seen):
        with pytest.raises(BusyError, match=r"is busy: Too many wait\.") as caught:
            ask(url, max_retries=1)
        assert caught.value.wait_s == 30
    assert len(seen) == 3


@pytest.mark.parametrize("stream", [b"", said(), said() + b"data: {"])
def test_a_stream_that_breaks_off_is_an_error_and_not_asked_again(stream: bytes) -> None:
    with (
        listening(reply(CARD), STREAM + stream) as (url, seen),
        pytest.raises(ServerError, match=r"connection broke|Check"),
    ):
        ask(url, max_retries=3)
    assert len(seen) == 2


def test_waiting_to_ask_again_ends_when_nobody_wants_the_answer() -> None:
    with listening(reply(CARD), busy("429 Too Many", "retry-after: 30\r\n")) as (url, seen):
        stream = RemoteEngine(url, max_retries=5).stream("Who?")
        while len(seen) < 2:
            time.sleep(0.01)
        stream.close()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("url", "key"), [("host:8000", ""), ("http://u:p@host", ""), ("http://host", "new\nline")]
)
def test_a_bad_address_or_key_is_refused_at_once(url: str, key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RemoteEngine(url, key)
    assert not any(secret in str(caught.value) for secret in ("u:p", "line"))


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_the_server_keeps_its_words(streamed: bool) -> None:
    told = {"error": {"message": "There is no field 'x'.", "type": "invalid_request_error"}}
    event = b"data: " + json.dumps(told).encode() + b"\n\n"
    answered = STREAM + said() + event if streamed else reply(told, "400 Bad")
    with (
        listening(reply(CARD), answered) as (url, _),
        pytest.raises((InputError, ServerError), match="There is no field 'x'"),
    ):
        ask(url)
