"""Requests by hand over raw sockets: what two programs may read in two ways, and more connections than there may be."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ragfuse import Settings
from ragfuse.serve.wire import Connections, network_of
from tests.serve.kit import Served, all_of, raw, serving, wait_for
from tests.serve.test_gone import long_request, send

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
NEXT = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def few(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that takes six connections of an address."""
    home = tmp_path_factory.mktemp("few")
    settings = Settings(
        model=str(tiny_path), dtype="float32", store=home / "store", home=home, serve_connections_each=6
    )
    with serving(settings) as made:
        yield made


def told(found: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of each response."""
    answers = []
    while found:
        head, _, rest = found.partition(b"\r\n\r\n")
        sizes = [
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        answers.append((int(head.split()[1]), json.loads(rest[: sizes[0]])))
        found = rest[sizes[0] :]
    return answers


AMBIGUOUS = {
    "both lengths": POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "both lengths, the other order": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths of nothing": GET + b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "a list of lengths": POST + b"content-length: 2, 3\r\n\r\n{} ",
    "a length that is no number": POST + b"content-length: 0x2\r\n\r\n{}",
    "a length with a sign": POST + b"content-length: +2\r\n\r\n{}",
    "an encoding twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "another encoding": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "LF alone": GET.replace(b"\r\n", b"\n") + b"\n",
    "LF alone in one line": GET + b"x-a: b\nx-c: d\r\n\r\n",
    "LF alone at the end": GET + b"\n",
    "LF alone before the end": GET + b"x-a: b\n\r\n",
    "LF alone before a request": b"\n" + GET + b"\r\n",
    "LF alone in a chunk's size": POST + b"transfer-encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    "LF alone behind a chunk": POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\n0\r\n\r\n",
    "LF alone in a trailer": POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: b\n\r\n",
    "CR alone": GET + b"x-a: b\rx-c: d\r\n\r\n",
    "a space before the colon": GET + b"content-length : 0\r\n\r\n",
    "a header that goes on": GET + b"x-a: b\r\n\tc\x00d\r\n\r\n",
    "a zero in a value": GET + b"x-a: \x00\r\n\r\n",
    "two hosts": GET + b"host: other\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_two_programs_may_read_in_two_ways_ends_the_connection(served: Served, name: str) -> None:
    with raw(served.port) as line:
        try:
            line.sendall(AMBIGUOUS[name] + NEXT)
            answers = told(all_of(line))
        except ConnectionError:  # closed with something unread
            answers = []
        assert [status for status, _ in answers] in ([400], [501], []), answers
        assert all(set(body["error"]) == {"message", "type", "param", "code"} for _, body in answers)
    assert served.get("/health").status_code == 200


def test_a_head_without_end_is_too_long(served: Served) -> None:
    with raw(served.port) as line:
        line.sendall(GET + b"x-a: " + b"b" * 65_532)
        [(status, body)] = told(all_of(line))
    assert (status, body["error"]["code"]) == (431, "too_large")
    assert served.get("/health").status_code == 200


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_request_is_read_however_it_is_cut(served: Served, step: int) -> None:
    body = b'{"model": "none", "prompt": "a"}'
    chunks = b"%x\r\n%s\r\n0\r\nx-trailer: a\r\n\r\n" % (len(body), body)
    whole = (
        POST
        + b"transfer-encoding: chunked\r\n\r\n"
        + chunks
        + NEXT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    )
    with raw(served.port) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(whole), step):
            line.sendall(whole[at : at + step])
        assert [status for status, _ in told(all_of(line))] == [404, 200]


@pytest.mark.parametrize("cut", range(1, 8))
def test_lf_alone_is_seen_wherever_a_head_is_cut(served: Served, cut: int) -> None:
    whole = GET + b"x: y\nz: w\r\n\r\n"
    at = whole.index(b"y\n") - 2 + cut
    with raw(served.port) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            line.sendall(whole[:at])
            line.sendall(whole[at:])
            answers = told(all_of(line))
        except ConnectionError:
            answers = []
    assert [status for status, _ in answers] in ([400], [])


def test_of_silent_connections_the_oldest_makes_room(few: Served) -> None:
    with ExitStack() as lines:
        silent = [lines.enter_context(raw(few.port)) for _ in range(6)]
        silent[0].sendall(b"GET /health HT")
        for at in range(20):
            assert few.get("/health").status_code == 200, at
        assert all_of(silent[0]) == b""
        for line in silent[1:]:  # one was enough, as who asks goes again
            line.setblocking(False)
            with pytest.raises(BlockingIOError):
                line.recv(1)


def test_where_all_connections_ask_something_a_new_one_is_told_in_json_and_health_is_answered(few: Served) -> None:
    with ExitStack() as lines:
        for _ in range(6):
            send(lines.enter_context(raw(few.port)), long_request(few, stream=True))
        wait_for(lambda: sum(not each.is_idle for each in few.server.server_state.connections) == 6)  # type: ignore[union-attr]
        answer = few.chat(max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["retry-after"]) >= 1
        assert few.get("/health").status_code == 200
        assert b'status="503"' in few.get("/metrics").content
    wait_for(lambda: few.service.admission.is_idle)
    assert few.chat(max_tokens=1).status_code == 200


class Line:
    """A connection that is only counted."""

    def __init__(self, is_idle: bool = True) -> None:
        self.is_idle, self.transport, self.ended = is_idle, self, ""

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


def test_one_address_takes_no_room_of_another() -> None:
    among = Connections(10, 4)
    busy = [Line(is_idle=False) for _ in range(9)]
    assert [among.enter(line, "a") for line in busy] == [True] * 4 + [False] * 5  # type: ignore[arg-type]
    assert [line.ended for line in busy] == [""] * 8 + ["aborted"]
    assert among.enter(Line(), "b")  # type: ignore[arg-type]
    for line in busy:
        among.leave(line)  # type: ignore[arg-type]
        among.leave(line)  # type: ignore[arg-type]
    assert len(among) == 1


def test_of_all_addresses_the_oldest_that_asks_nothing_makes_room() -> None:
    among, lines = Connections(5, 3), [Line(is_idle=at != 0) for at in range(8)]
    assert all(among.enter(line, f"address {at}") for at, line in enumerate(lines))  # type: ignore[arg-type]
    assert [line.ended for line in lines] == ["", "closed", "closed", "closed", "", "", "", ""]
    assert len(among) == 5


def test_a_household_counts_as_one() -> None:
    assert network_of("192.0.2.7") == network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("") == ""
