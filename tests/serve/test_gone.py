"""Clients that go away or are slow: nothing goes on for them, and others are answered meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serve.kit import (
    CHAT,
    LONG,
    Served,
    all_of,
    asking,
    raw,
    said,
    wait_for,
    writers,
)


@pytest.fixture(scope="module")
def one(make_server: Callable[..., Served], tiny_path: Path) -> Served:
    """A server that answers one request at a time, as long as anybody likes, and has little
    patience.
    """
    return make_server(model=tiny_path, serve_together=1, serve_patience_s=1.0)


@contextmanager
def begun(served: Served) -> Iterator[None]:
    """A stream of which the first words have come, and that is left at the end."""
    body = {"model": served.service.model, "messages": [said()], "max_tokens": LONG, "stream": True}
    with httpx.stream("POST", f"{served.root}{CHAT}", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if '"content": ' in line and "assistant" not in line)
        yield


def test_leaving_a_stream_ends_its_answer(one: Served) -> None:
    with begun(one):
        assert writers()
    wait_for(one.is_idle)
    assert 0 < one.engine().counters.now().sums["written"] < LONG


@pytest.mark.parametrize("streams", [False, True])
def test_leaving_before_the_first_token_ends_the_answer(one: Served, streams: bool) -> None:
    with asking(one, stream=streams, n=3):
        wait_for(writers)
    wait_for(one.is_idle)


def test_leaving_the_queue_cancels_the_request(one: Served) -> None:
    def answers() -> int:
        sums = one.engine().counters.now().sums
        return sum(n for kind, n in sums.items() if kind.startswith(("full ", "fused")))

    before = answers()
    with begun(one):
        with asking(one):
            wait_for(lambda: one.waiting() == 1)
        wait_for(lambda: one.waiting() == 0)
        assert len(writers()) == 1
    wait_for(one.is_idle)
    assert answers() - before == 1


def test_a_client_that_does_not_read_keeps_no_turn(one: Served) -> None:
    with asking(one, stream=True, max_tokens=600) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        wait_for(writers)
        wait_for(one.is_idle)  # written, although nobody read it
        assert one.chat(max_tokens=2).status_code == 200


def test_a_body_that_does_not_come_is_refused(one: Served) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with raw(one.port) as line:
        line.sendall(f"{head}content-length: 5000\r\n\r\n{{".encode())
        assert b" 408 " in all_of(line)
