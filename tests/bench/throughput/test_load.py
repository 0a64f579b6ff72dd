"""The open loop: independent arrivals, requests that come whether others are answered or not, and
what is heard.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from ragfuse_bench.throughput.load import (
    Heard,
    arrivals,
    ask,
    counted,
    offer,
    summed,
)


def event(told: Any) -> bytes:
    return f"data: {told if isinstance(told, str) else json.dumps(told)}\n\n".encode()


@contextmanager
def answering(hold: threading.Event | None = None) -> Iterator[tuple[tuple[str, int], list[float]]]:
    """A server of streams; `hold` keeps all back until it is set. What it is told says what it
    does.
    """
    came: list[float] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            came.append(time.monotonic())
            if hold is not None:
                hold.wait(30)
            kind = body["kind"]
            self.send_response(503 if kind == "busy" else 200)
            self.end_headers()
            if kind == "busy":
                self.wfile.write(b"come later")
                return
            self.wfile.write(event({"choices": [{"delta": {"content": "a"}}]}))
            if kind == "wrong":
                self.wfile.write(event({"error": {"message": "no"}}))
            elif kind == "right":
                self.wfile.write(event({"choices": [], "usage": {"completion_tokens": 7}}))
                self.wfile.write(event("[DONE]"))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield ("127.0.0.1", server.server_port), came
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_arrivals_are_independent_of_each_other_and_as_many_as_the_rate_says():
    due = arrivals(5.0, 2000.0, seed=1)
    assert due == sorted(due) == arrivals(5.0, 2000.0, seed=1)
    assert due != arrivals(5.0, 2000.0, seed=2)
    assert 0 <= due[0] <= due[-1] < 2000
    assert len(due) == pytest.approx(10_000, rel=0.05)
    gaps = [late - early for early, late in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    # exponential
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_requests_come_when_they_are_due_although_none_is_answered():
    hold = threading.Event()
    with answering(hold) as (place, came):
        found: list[Heard] = []
        due = [0.0, 0.05, 0.1, 0.15]
        loop = threading.Thread(
            target=lambda: found.extend(offer(place, [{"kind": "right"}] * 4, due, 30))
        )
        loop.start()
        until_s = time.monotonic() + 30
        while len(came) < 4 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert (len(came), found) == (4, [])
        released_s = time.monotonic()
        hold.set()
        loop.join(30)
    assert [each.due_s for each in found] == due
    assert [each.wrong for each in found] == [""] * 4
    assert all(each.first_s is not None and each.whole_s is not None for each in found)
    assert all(each.whole_s >= each.first_s for each in found)
    for each in found:  # time counts from when each was due, not from when it was heard
        assert each.first_s >= released_s - came[0] - each.due_s


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("busy", "503: b'come later'"), ("wrong", "'message': 'no'"), ("cut", "the answer broke off")],
)
def test_what_is_not_answered_to_its_end_is_lost_and_says_why(kind, wrong):
    with answering() as (place, _):
        heard = ask(place, {"kind": kind}, time.monotonic(), 30)
        right = ask(place, {"kind": "right"}, time.monotonic(), 30)
    assert (heard.first_s, heard.whole_s) == (None, None)
    assert wrong in heard.wrong
    assert (right.wrong, right.tokens) == ("", 7)


def test_the_first_sixth_does_not_count_and_lost_requests_do():
    found = [Heard(float(at), 100.0 if at < 2 else float(at), 100.0 + at, 3) for at in range(11)]
    found.append(Heard(11.0, wrong="gone"))
    assert len(counted(found)) == 10
    told = summed(2.0, found)
    first = list(range(2, 11))
    assert told["mean_s"] == pytest.approx(sum(first) / len(first))
    assert told["p95_s"] == pytest.approx(2 + 0.95 * 8)
    assert (told["rate"], told["n"], told["lost"], told["wrong"]) == (2.0, 12, 1, ["gone"])
    assert told["tokens_per_s"] == pytest.approx(33 / 120)
    assert summed(1.0, [Heard(0.0, wrong="gone")])["mean_s"] is None
