"""What is proportional to a request takes its turn; who watches over the server waits for none of
it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ragfuse import Engine, Settings
from ragfuse.serve import completions
from ragfuse.serve.service import Service
from tests.serve.kit import Served, raw, said, serving, settings_of, wait_for
from tests.serve.test_gone import is_idle
from tests.tiny import CHUNKS


@pytest.fixture
def two(tiny_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server that answers two requests at a time."""
    settings = settings_of(
        tiny_path,
        tmp_path,
        serve_together=2,
    )
    with serving(settings) as made:
        yield made


def engine_of(served: Served) -> Engine:
    return served.service.engine(served.service.keys.tenants[0])


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


def explain_request(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/ragfuse/explain", {"messages": [said(text)]}


def send_to(line: socket.socket, path: str, body: dict[str, Any] | None) -> None:
    """A request, by hand; without a body it is a GET."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n" if data else ""
    line.sendall(
        f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\n".encode()
        + data
    )


def test_thirty_explains_whose_senders_are_gone_starve_nobody(two: Served) -> None:
    with gated(engine_of(two), "plan") as gate:
        with ExitStack() as lines:
            for _ in range(30):
                send_to(lines.enter_context(raw(two.port)), *explain_request(f"{CHUNKS[0]} " * 20))
            wait_for(lambda: gate.inside == 1 and len(two.service.admission.jobs) == 28)
            assert two.get("/health").status_code == 200
            assert b"ragfuse_requests_waiting 28.0" in two.get("/metrics").content
            assert two.get("/v1/ragfuse/store").status_code == 200
        wait_for(lambda: len(two.service.admission.jobs) == 0)
        gate.opened.set()
        assert two.chat(max_tokens=2).status_code == 200
        wait_for(lambda: is_idle(two))
        assert gate.came <= 2  # two turns at most had come


def test_what_requests_want_is_found_one_at_a_time(two: Served) -> None:
    body = {"model": two.service.model, "max_tokens": 1, "messages": [said()]}
    with gated(completions, "chat_requests") as gate:
        with ExitStack() as lines:
            for _ in range(12):
                send_to(lines.enter_context(raw(two.port)), "/v1/chat/completions", body)
            wait_for(lambda: gate.inside == 1)
            assert two.get("/health").status_code == 200
        wait_for(lambda: is_idle(two))
        gate.opened.set()
        assert two.chat(max_tokens=2).status_code == 200
        assert gate.most == 1


def test_who_watches_is_answered_while_all_else_is_busy(two: Served) -> None:
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


def test_looks_at_the_store_whose_senders_are_gone_are_not_made(two: Served) -> None:
    engine = engine_of(two)
    with gated(engine.schemas, "ls") as gate:
        with ExitStack() as lines:
            for _ in range(20):
                send_to(lines.enter_context(raw(two.port)), "/v1/ragfuse/schemas", None)
            wait_for(
                lambda: gate.inside == 2 and two.service.threads.lookups._work_queue.qsize() == 18
            )
        wait_for(
            lambda: b'path="/v1/ragfuse/schemas",status="499"} 20.0' in two.get("/metrics").content
        )
        gate.opened.set()
        assert two.get("/v1/ragfuse/schemas").status_code == 200
        assert gate.came <= 3


async def test_work_whose_time_is_over_is_told_and_keeps_its_turn_until_it_ends(
    tiny_settings: Settings,
) -> None:
    service = Service(
        tiny_settings.model_copy(update={"serve_timeout_s": 1.0, "serve_together": 1})
    )
    tenant, enough = service.keys.tenants[0], threading.Event()
    await asyncio.to_thread(service.engine, tenant)
    with pytest.raises(TimeoutError):
        await service.work(tenant, lambda engine, check: enough.wait(60))
    assert len(service.admission.jobs.running) == 1
    enough.set()
    while service.admission.jobs.running:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(service.close)
    service.threads.close()
