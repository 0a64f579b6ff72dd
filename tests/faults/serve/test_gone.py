"""Clients that go away or are slow: nothing goes on for them, and others are answered meanwhile."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.kits.serve import (
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
        line.settimeout(60)
        line.sendall(f"{head}content-length: 5000\r\n\r\n{{".encode())
        assert b" 408 " in all_of(line)


@contextmanager
def watched(served: Served) -> Iterator[None]:
    """Nobody waits or is answered at the end, others are, and memory and threads are as they
    were, but for what executors and caches take once.
    """
    assert served.chat(max_tokens=2).status_code == 200
    process, threads = psutil.Process(), threading.active_count()
    rss = process.memory_info().rss
    yield
    wait_for(served.is_idle)
    assert served.chat(max_tokens=2).status_code == 200
    wait_for(lambda: threading.active_count() <= threads + 32)
    assert (process.memory_info().rss - rss) / 1e6 <= 400


def test_silent_connections_keep_nobody_from_an_answer(one: Served) -> None:
    with watched(one), ExitStack() as lines:
        for number in range(200):
            lines.enter_context(raw(one.port)).sendall(b"POST /v1/completions"[: number % 3 * 9])
        assert one.get("/health").status_code == one.chat(max_tokens=2).status_code == 200


def test_clients_that_go_away_in_the_middle_of_anything_leave_nothing_behind(one: Served) -> None:
    text = "The keeper of the lighthouse counted ships. " * 40
    chat = {"model": one.service.model, "messages": [said(text)]}
    bodies = (
        (CHAT, chat),
        (CHAT, {**chat, "max_tokens": LONG, "stream": True}),
        ("/v1/ragfuse/schemas", {"pml": f'<schema name="a">{text}</schema>'}),
    )

    def storm(number: int) -> None:
        for turn in range(21):
            path, fields = bodies[(number + turn) % 3]
            body = json.dumps(fields).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            with suppress(ConnectionError), raw(one.port) as line:
                line.sendall(whole[: len(whole) * (turn % 7) // 6])

    with watched(one), ThreadPoolExecutor(8) as clients:
        list(clients.map(storm, range(8)))
