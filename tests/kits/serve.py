"""A server on a free port of this machine, in a thread or in a process of its own; what tests send
to it by hand.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from ragfuse import Engine, Settings, StoreError
from ragfuse.serve.keys import Keys
from ragfuse.serve.server import Server, bound
from ragfuse.serve.service import Service
from tests.kits.tiny import CHUNKS, ROOT

QUESTION = "Who kept the northern lighthouse?"
PATIENCE_S = 300.0
BLUE, GREEN = "blue-key-of-a-test-1", "green-key-of-a-test-1"
TENANTS = (f"blue:{BLUE}", f"green:{GREEN}")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = 3000
"""Tokens of an answer that lasts until its client leaves."""
DOOR = {"type": "object", "properties": {"door": {"enum": ["green", "red"]}}, "required": ["door"]}
TOOL = {"name": "count_ships", "description": "Counts.", "parameters": DOOR}


@dataclass(frozen=True)
class Served:
    """A running server. root: its address without a path."""

    root: str
    service: Service
    server: Server
    thread: threading.Thread
    key: str = ""

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def of(self, key: str) -> Served:
        """The same server, asked with this API key."""
        return replace(self, key=key)

    def engine(self, tenant: int = 0) -> Engine:
        return self.service.engine(self.service.keys.tenants[tenant])

    def is_idle(self) -> bool:
        queue = self.service.queue
        return not len(queue) and not queue.running and not writers()

    def waiting(self) -> int:
        return len(self.service.queue)

    def request(self, method: str, path: str, headers: dict[str, str], **more: Any) -> Any:
        told = {"authorization": f"Bearer {self.key}"} if self.key else {}
        url, headers = f"{self.root}{path}", told | headers
        return httpx.request(method, url, headers=headers, timeout=PATIENCE_S, **more)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.request("POST", path, headers, json=body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.request("GET", path, headers)

    def delete(self, path: str, **headers: str) -> httpx.Response:
        return self.request("DELETE", path, headers)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post(CHAT, {"model": self.service.model, "messages": [said()], **fields})


@dataclass(frozen=True)
class Client:
    """OpenAI's own client of a server, with the name of its model."""

    openai: Any
    model: str

    def chat(self, question: str = "Who?", **fields: Any) -> Any:
        asked = {"model": self.model, "messages": [said(question)], **fields}
        return self.openai.chat.completions.create(**asked)

    def text(self, prompt: Any, **fields: Any) -> Any:
        return self.openai.completions.create(model=self.model, prompt=prompt, **fields)

    def respond(self, input: Any = "Who?", **fields: Any) -> Any:
        return self.openai.responses.create(model=self.model, input=input, **fields)


def client_of(served: Served) -> Client:
    openai = pytest.importorskip("openai", reason="the client is not installed")
    told = {"base_url": served.url, "api_key": served.key or "none", "timeout": PATIENCE_S}
    return Client(openai.OpenAI(max_retries=0, **told), served.service.model)


def said(text: str = QUESTION, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def settings_of(model: Path, home: Path, **more: Any) -> Settings:
    """Settings of a server over this model that keeps all in one folder."""
    return Settings(model=str(model), dtype="float32", store=home / "store", home=home, **more)


def with_documents(n: int = 3) -> dict[str, Any]:
    return {
        "documents": [{"text": text, "title": f"book-{at}"} for at, text in enumerate(CHUNKS[:n])]
    }


@contextmanager
def serving(
    settings: Settings, keys: Keys | None = None, host: str = "127.0.0.1", **options: Any
) -> Iterator[Served]:
    """A server in a thread, stopped at the end."""
    service = Service(settings, keys)
    made = bound("127.0.0.1", 0)
    server = Server(service, host=host, **options)
    thread = threading.Thread(target=server.run, args=([made],), name="test-server")
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield Served(f"http://127.0.0.1:{made.getsockname()[1]}", service, server, thread)
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        made.close()
        assert not thread.is_alive()


def access_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The server's lines on its requests; one is written after its answer was sent."""
    return [each.getMessage() for each in caplog.records if each.name == "ragfuse.serve.access"]


def wait_for(is_so: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Until it is so; fails where it never is."""
    until_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < until_s, "it never came"
        time.sleep(0.01)


def writers() -> list[str]:
    """Threads that write answers now."""
    return [thread.name for thread in threading.enumerate() if thread.name == "ragfuse-answer"]


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream that came to its end."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """What an error says, in OpenAI's form."""
    assert answer.status_code == status, answer.text
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert "Traceback" not in told["message"]
    return dict(told)


@contextmanager
def raw(port: int) -> Iterator[socket.socket]:
    """A connection by hand."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
        yield line


def send(line: socket.socket, path: str, body: Any = None, **headers: Any) -> None:
    """A request, by hand; without a body it is a GET."""
    data = b"" if body is None else json.dumps(body).encode()
    kind = {"content-type": "application/json", "content-length": len(data)} if data else {}
    told = {"host": "localhost", **kind, **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    line.sendall(f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)


@contextmanager
def asking(served: Served, **fields: Any) -> Iterator[socket.socket]:
    """A chat whose answer would be long, left at the end."""
    with raw(served.port) as line:
        body = {"model": served.service.model, "messages": [said()], "max_tokens": LONG, **fields}
        told = {"authorization": f"Bearer {served.key}"} if served.key else {}
        send(line, CHAT, body, **told)
        yield line


def all_of(line: socket.socket) -> bytes:
    """What comes until the other side ends."""
    found = b""
    while piece := line.recv(1 << 16):
        found += piece
    return found


@contextmanager
def process(
    settings: Settings, *arguments: str, log: list[str] | None = None, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ragfuse serve` in a process of its own, and its address; what it logs after that goes to
    `log`.
    """
    told = ("model", "dtype", "store", "home", "max_tokens")
    variables = {f"RAGFUSE_{name.upper()}": str(getattr(settings, name)) for name in told}
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from ragfuse.cli import app; app()",
            "serve",
            "--port",
            "0",
            *arguments,
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **variables,
            **environment,
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    lines = deque[str](maxlen=0) if log is None else log
    # a full pipe would stop it
    reading = threading.Thread(target=lines.extend, args=(run.stderr,), name="test-log")
    try:
        address = _address(run)
        reading.start()
        yield run, address
    finally:
        run.kill()
        run.wait()
        if reading.ident is not None:
            reading.join()
        run.stderr.close()


def _address(run: subprocess.Popen[str]) -> str:
    assert run.stderr is not None
    for line in run.stderr:
        if " answers at " in line:
            return line.split(" answers at ")[1].split("/v1")[0]
    raise AssertionError("the server did not begin")


@contextmanager
def read_only_disk(served: Served) -> Iterator[None]:
    """Let the index of every tenant's disk tier reject writes, as one on a read-only or full disk
    does.
    """

    def refuse() -> NoReturn:
        raise StoreError("attempt to write a readonly database")

    with pytest.MonkeyPatch.context() as patch:
        for tenant in served.service.keys.tenants:
            patch.setattr(served.service.engine(tenant).store.tier("disk")._index, "write", refuse)
        yield
