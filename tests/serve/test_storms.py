"""Very many clients at once, silent, slow or gone: others are answered meanwhile, and nothing is
left behind.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.kit import CHAT, TEXT, process, said, settings_of, wait_for
from tests.serve.test_ending import ended, model_of

pytestmark = pytest.mark.slow

MORE_MB, MORE_THREADS = 400, 32
"""What a server may have more after a storm than before: what executors and caches take once, no
more by request.
"""


@dataclass
class Watched:
    """A server in a process of its own, and what it had after its first answers."""

    root: str
    model: str
    process: psutil.Process
    rss: int
    threads: int

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def ask(self, **fields: object) -> httpx.Response:
        body = {"model": self.model, "messages": [said()], "max_tokens": 4, **fields}
        return httpx.post(f"{self.root}{CHAT}", json=body, timeout=300)

    def counted(self, name: str) -> float:
        lines = httpx.get(f"{self.root}/metrics", timeout=60).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def check(self) -> None:
        """Nobody waits or is answered, others are, and memory and threads are as they were."""
        wait_for(
            lambda: (
                self.counted("ragfuse_requests_running")
                == self.counted("ragfuse_requests_waiting")
                == 0
            )
        )
        assert self.ask().status_code == 200
        wait_for(lambda: self.process.num_threads() <= self.threads + MORE_THREADS)
        assert (self.process.memory_info().rss - self.rss) / 1e6 <= MORE_MB


@pytest.fixture
def watched(tiny_path: Path, tmp_path: Path) -> Iterator[Watched]:
    """One that lets 400 wait, and ends cleanly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    settings = settings_of(tiny_path, tmp_path, max_tokens=64)
    with process(settings, RAGFUSE_SERVE_WAITING="400", RAGFUSE_LEARN="off") as (run, root):
        made = Watched(root, model_of(root), psutil.Process(run.pid), 0, 0)
        for _ in range(3):
            assert made.ask().status_code == 200
        made.rss, made.threads = made.process.memory_info().rss, made.process.num_threads()
        yield made
        run.send_signal(signal.SIGTERM)
        assert ended(run) == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def together(n: int, do: Callable[[int], object]) -> None:
    """Call from so many threads at once."""
    threads = [threading.Thread(target=do, args=(number,)) for number in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()


def test_five_hundred_streams_that_are_left_end(watched: Watched) -> None:
    def leave(number: int) -> None:
        body = {"model": watched.model, "messages": [said()], "max_tokens": 3000, "stream": True}
        for _ in range(25):
            with httpx.stream("POST", f"{watched.root}{CHAT}", json=body, timeout=300) as answer:
                assert answer.status_code == 200
                next(answer.iter_lines())

    together(20, leave)
    watched.check()


def test_fifteen_hundred_silent_connections_keep_nobody_from_an_answer(watched: Watched) -> None:
    with ExitStack() as lines:
        for number in range(1500):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", watched.port)))
            if number % 3:
                with suppress(ConnectionError):
                    line.sendall(
                        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99"[
                            : number % 70
                        ]
                    )
        for _ in range(10):
            assert httpx.get(f"{watched.root}/health", timeout=60).status_code == 200
            assert watched.ask().status_code == 200
        assert watched.process.num_threads() <= watched.threads + MORE_THREADS
    watched.check()


def test_clients_that_go_away_in_the_middle_of_anything_leave_nothing_behind(
    watched: Watched,
) -> None:
    text = "The keeper of the lighthouse counted ships. " * 40
    model = {"model": watched.model}
    bodies = (
        (CHAT, {**model, "messages": [said(text)]}),
        (TEXT, {**model, "prompt": text}),
        ("/v1/ragfuse/explain", {"messages": [said(text)]}),
        ("/v1/ragfuse/schemas", {"pml": f'<schema name="a">{text}</schema>'}),
    )

    def storm(number: int) -> None:
        for turn in range(30):
            path, fields = bodies[(number + turn) % 4]
            body = json.dumps(fields).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            whole = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            with (
                suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", watched.port)) as line,
            ):
                line.sendall(whole[: len(whole) * (turn % 7) // 6])
                if turn % 5 == 0:
                    line.settimeout(0.2)
                    with suppress(TimeoutError):
                        line.recv(10)

    together(40, storm)
    watched.check()


def test_a_signal_in_a_storm_answers_or_refuses_each_and_ends_cleanly(
    tiny_path: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_path, tmp_path, max_tokens=64)
    statuses, begun = Counter[int](), threading.Semaphore(0)
    with process(settings, RAGFUSE_SERVE_WAITING="400") as (run, root):
        body = {"model": model_of(root), "messages": [said()]}

        def ask(number: int) -> None:
            try:
                answer = httpx.post(f"{root}{CHAT}", json=body, timeout=300)
            except httpx.TransportError:  # it came when nobody listened any more
                statuses["gone"] += 1  # type: ignore[index]
            else:
                statuses[answer.status_code] += 1
                assert answer.status_code == 200 or answer.headers["retry-after"] == "5"
            begun.release()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        begun.acquire()
        run.send_signal(signal.SIGTERM)
        assert ended(run) == 0
        for thread in threads:
            thread.join(60)
    assert set(statuses) <= {200, 503, "gone"}
    assert statuses[200] >= 1
