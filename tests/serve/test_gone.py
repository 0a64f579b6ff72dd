"""Clients that go away or are slow: nothing goes on for them, and others are answered meanwhile."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.kit import Served, all_of, raw, said, serving, settings_of, wait_for, writers

LONG = 3000


@pytest.fixture(scope="module")
def one(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that answers one request at a time, as long as anybody likes, and has little
    patience.
    """
    home = tmp_path_factory.mktemp("one")
    settings = settings_of(
        tiny_path,
        home,
        serve_together=1,
        serve_patience_s=1.0,
    )
    with serving(settings) as made:
        yield made


def long_request(served: Served, **fields: Any) -> dict[str, Any]:
    return {"model": served.service.model, "messages": [said()], "max_tokens": LONG, **fields}


def send(line: socket.socket, body: dict[str, Any]) -> None:
    """A request, by hand."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type:"
        " application/json\r\n"
    )
    line.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


def is_idle(served: Served) -> bool:
    return served.service.admission.is_idle and not writers()


def test_who_leaves_a_stream_ends_its_answer(one: Served) -> None:
    with httpx.stream(
        "POST", f"{one.url}/chat/completions", json=long_request(one, stream=True), timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if '"content": ' in line and "assistant" not in line:
                break
        assert writers()
    wait_for(lambda: is_idle(one))
    written = one.service.engine(one.service.keys.tenants[0]).counters.now().sums["written"]
    assert 0 < written < LONG


@pytest.mark.parametrize("streams", [False, True])
def test_who_leaves_before_anything_came_ends_it_too(one: Served, streams: bool) -> None:
    with raw(one.port) as line:
        send(line, long_request(one, stream=streams, n=3))
        wait_for(writers)
    wait_for(lambda: is_idle(one))


def test_who_leaves_the_queue_is_not_answered(one: Served) -> None:
    counters = one.service.engine(one.service.keys.tenants[0]).counters

    def answers() -> int:
        return sum(
            n for kind, n in counters.now().sums.items() if kind.startswith(("full ", "fused"))
        )

    before = answers()
    with raw(one.port) as first:
        send(first, long_request(one))
        wait_for(writers)
        with raw(one.port) as second:
            send(second, long_request(one))
            wait_for(lambda: len(one.service.admission.jobs) == 1)
        wait_for(lambda: len(one.service.admission.jobs) == 0)
        assert len(writers()) == 1
    wait_for(lambda: is_idle(one))
    assert answers() - before == 1


def test_who_does_not_read_keeps_no_turn(one: Served) -> None:
    with raw(one.port) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        send(line, long_request(one, stream=True, max_tokens=600))
        wait_for(writers)
        wait_for(lambda: is_idle(one))  # written, although nobody read it
        assert one.chat(max_tokens=2).status_code == 200


def test_a_body_that_does_not_come_is_told(one: Served) -> None:
    with raw(one.port) as line:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type:"
            b" application/json\r\n"
        )
        line.sendall(head + b"content-length: 5000\r\n\r\n{")
        assert b" 408 " in all_of(line)
