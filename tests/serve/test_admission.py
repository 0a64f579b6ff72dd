"""What is proportional to a request takes its turn; who watches over the server waits for none of
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragfuse.serve import completions
from tests.serve.kit import CHAT, Served, raw, said, send, serving, settings_of, wait_for
from tests.tiny import CHUNKS


@pytest.fixture
def two(tiny_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server that answers two requests at a time."""
    with serving(settings_of(tiny_path, tmp_path, serve_together=2)) as made:
        yield made


class Gate:
    """A function that waits until it is let go on; counts who is in it, and who came."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.opened, self.lock = real, threading.Event(), threading.Lock()
        self.came = self.inside = self.most = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self.lock:
            self.came, self.inside = self.came + 1, self.inside + 1
            self.most = max(self.most, self.inside)
        try:
            assert self.opened.wait(60)
            return self.real(*args, **options)
        finally:
            with self.lock:
                self.inside -= 1


@contextmanager
def gated(where: Any, name: str) -> Iterator[Gate]:
    """This function waits at a gate."""
    gate = Gate(getattr(where, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, gate)
        try:
            yield gate
        finally:
            gate.opened.set()


@contextmanager
def clients(served: Served, n: int, path: str, body: Any = None) -> Iterator[None]:
    """So many who ask at once, and leave at the end."""
    with ExitStack() as lines:
        for _ in range(n):
            send(lines.enter_context(raw(served.port)), path, body)
        yield


def test_thirty_explains_whose_senders_are_gone_starve_nobody(two: Served) -> None:
    body = {"messages": [said(f"{CHUNKS[0]} " * 20)]}
    with gated(two.engine(), "plan") as gate:
        with clients(two, 30, "/v1/ragfuse/explain", body):
            wait_for(lambda: gate.inside == 1 and two.waiting() == 28)
            assert two.get("/health").status_code == 200
            assert b"ragfuse_requests_waiting 28.0" in two.get("/metrics").content
            assert two.get("/v1/ragfuse/store").status_code == 200
        wait_for(lambda: two.waiting() == 0)
        gate.opened.set()
        assert two.chat(max_tokens=2).status_code == 200
        wait_for(two.is_idle)
        assert gate.came <= 2  # two turns at most had come


def test_what_requests_want_is_found_one_at_a_time(two: Served) -> None:
    body = {"model": two.service.model, "max_tokens": 1, "messages": [said()]}
    with gated(completions, "chat_requests") as gate:
        with clients(two, 12, CHAT, body):
            wait_for(lambda: gate.inside == 1)
            assert two.get("/health").status_code == 200
        wait_for(two.is_idle)
        gate.opened.set()
        assert two.chat(max_tokens=2).status_code == 200
        assert gate.most == 1


def test_health_and_metrics_answer_while_all_else_is_busy(two: Served) -> None:
    threads, enough = two.service.threads, threading.Event()
    try:
        for pool in (threads.intake, threads.ahead, threads.lookups, threads.turns):
            for _ in range(4 * pool._max_workers):
                pool.submit(enough.wait, 60)
        for _ in range(5):
            assert two.get("/health").json()["status"] == "ok"
            assert b"ragfuse_requests_total" in two.get("/metrics").content
            assert two.get("/v1/models").status_code == 200
    finally:
        enough.set()
