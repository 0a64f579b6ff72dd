"""A line carries what its trace says and no more, shares it, stands still and breaks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import settings as slowly
from hypothesis import strategies as some
from ragfuse_bench.line import LEAST_NBYTES, TICK_S, Line, Trace, line_to, recorded

NBYTES = 300_000


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends `NBYTES` to whoever says anything, as often as they do."""

    def serve(near: socket.socket) -> None:
        with near:
            try:
                while near.recv(1):
                    near.sendall(bytes(NBYTES))
            except OSError:
                pass

    def accept() -> None:
        try:
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def line(echo) -> Iterator[Line]:
    with line_to(echo) as line:
        yield line


def fetch(line: Line, nbytes: int = NBYTES) -> int:
    """Bytes that came of what was asked for."""
    with closing(socket.create_connection(("127.0.0.1", line.port))) as near:
        near.settimeout(30)
        near.sendall(b"?")
        came = 0
        while came < nbytes and (data := near.recv(1 << 16)):
            came += len(data)
        return came


steps = some.lists(
    some.tuples(some.floats(0.01, 5), some.just(0.0) | some.floats(1, 1e6)), min_size=1, max_size=6
)


def trace_of(spans: list[tuple[float, float]]) -> Trace:
    at, made = 0.0, []
    for seconds, rate in spans:
        made.append((at, rate))
        at += seconds
    return Trace("made up", tuple(made))


@slowly(deadline=None)
@given(steps, some.floats(0, 40))
def test_what_has_passed_by_a_time_has_passed_by_then(spans, seconds):
    trace = trace_of(spans)
    passed = trace.carried(seconds)
    assert trace.when(passed) <= seconds * (1 + 1e-9) + 1e-6 or not passed
    by_hand = sum(trace.rate(n * seconds / 4000) * seconds / 4000 for n in range(4000))
    assert passed == pytest.approx(by_hand, abs=1e6 * seconds / 4000 * (1 + len(spans)) + 1e-9)


def test_scaling_keeps_what_a_trace_looks_like():
    trace = recorded("phone", [(0.5, 8), (1.5, 0), (3.5, 16)])
    assert trace.steps == ((0.0, 1e6), (1.0, 0.0), (3.0, 2e6))
    assert trace.scaled(3, speed=2).steps == ((0.0, 3e6), (0.5, 0.0), (1.5, 6e6))
    assert trace.to_mean(7e5, 4.0).carried(4.0) == pytest.approx(2.8e6)


def test_everything_arrives_and_never_more_than_the_trace_allows(line):
    trace = Trace("made up", ((0.0, 1e6), (0.1, 4e6), (0.2, 5e5), (0.4, 3e6)))
    line.start(trace)
    came = []
    threads = [threading.Thread(target=lambda: came.append(fetch(line))) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert came == [NBYTES] * 3
    passed = 0
    for at, nbytes in line.log:
        passed += nbytes
        assert passed <= trace.carried(at + 2 * TICK_S) + LEAST_NBYTES
    assert passed == line.carried >= 3 * NBYTES
