"""What is proportional to a request takes its turn; who watches over the server waits for none of
it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.serve import Served, raw, said, send, serving, settings_of, wait_for
from tests.kits.tiny import CHUNKS


@pytest.fixture
def two(tiny_path: Path, tmp_path: Path) -> Iterator[Served]:
    """A server that answers two requests at a time."""
    with serving(settings_of(tiny_path, tmp_path, serve_together=2)) as made:
        yield made


@contextmanager
def gated(where: Any, name: str) -> Iterator[tuple[list[str], threading.Event]]:
    """This function waits until the event is set; who came, and the event."""
    came, opened, real = list[str](), threading.Event(), getattr(where, name)

    def wait(*args: Any, **options: Any) -> Any:
        came.append(name)
        assert opened.wait(60)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, wait)
        try:
            yield came, opened
        finally:
            opened.set()


@contextmanager
def clients(served: Served, n: int, path: str, body: Any = None) -> Iterator[None]:
    """So many who ask at once, and leave at the end."""
    with ExitStack() as lines:
        for _ in range(n):
            send(lines.enter_context(raw(served.port)), path, body)
        yield


def test_thirty_explains_whose_senders_are_gone_starve_nobody(two: Served) -> None:
    body = {"model": two.service.model, "messages": [said(f"{CHUNKS[0]} " * 20)]}
    with gated(two.engine(), "plan") as (came, opened):
        with clients(two, 30, "/v1/ragfuse/explain", body):
            wait_for(lambda: len(came) == 2 and two.waiting() == 28)
            assert two.get("/health").status_code == 200
            assert b"ragfuse_requests_waiting 28.0" in two.get("/metrics").content
            assert two.get("/v1/ragfuse/store").status_code == 200
        wait_for(lambda: two.waiting() == 0)
        opened.set()
        assert two.chat(max_tokens=2).status_code == 200
        wait_for(two.is_idle)
        assert len(came) <= 2  # two turns at most had come


def test_health_and_metrics_answer_while_all_else_is_busy(two: Served) -> None:
    threads, enough = two.service.threads, threading.Event()
    try:
        for pool in (threads.intake, threads.ahead, threads.lookups, threads.turns):
            for _ in range(4 * pool._max_workers):
                pool.submit(enough.wait)
        for path, told in (("health", "ok"), ("metrics", "ragfuse_requests"), ("v1/models", "id")):
            assert told in httpx.get(f"{two.root}/{path}", timeout=60).text
    finally:
        enough.set()
