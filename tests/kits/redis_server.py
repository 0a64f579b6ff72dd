"""A real redis-server on loopback for tests, and raw looks into it."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ragfuse.store.redis import _PREFIX

SCALE = 10_000
"""Databases of a server: each tier of the contract suite gets one of its own."""
_database = itertools.count(1)


class RedisServer:
    """A server with its files in `folder`, without persistence; it can be killed, stopped and
    started again.
    """

    def __init__(self, folder: Path, *options: object) -> None:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        pytest.importorskip("redis", reason="the package redis is not installed: pip install redis")
        self.port, self.folder = free_port(), folder
        self._options = ["--databases", SCALE, *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, empty, on the port it had."""
        addresses = ["--port", self.port, "--bind", "127.0.0.1", "--unixsocket", self.folder / "s"]
        quiet = [
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            self.folder,
            "--logfile",
            self.folder / "log",
        ]
        command = ["redis-server", *addresses, *quiet, *self._options]
        self.process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
        for _ in range(12000):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.folder / "s")) == 0:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.005)
        raise RuntimeError((self.folder / "log").read_text())

    def signal(self, number: int) -> None:
        """Send it a signal; it is dead, or standing still, when this returns."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def url(self, database: int = 0, auth: str = "") -> str:
        """redis:// and so on."""
        return f"redis://{auth}127.0.0.1:{self.port}/{database}"

    def raw(self, database: int = 0, **options):
        """A client of its own."""
        import redis

        return redis.Redis(unix_socket_path=str(self.folder / "s"), db=database, **options)


def until(true: Callable[[], object]) -> None:
    """Waits until `true()`."""
    for _ in range(12000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("never")


def fresh_url() -> str:
    """An empty database of a server that all tests share."""
    return _shared().url(next(_database))


@cache
def _shared() -> RedisServer:
    folder = Path(tempfile.mkdtemp(prefix="ragfuse-redis-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = RedisServer(folder)
    atexit.register(server.kill)
    return server


def value_name(key: object) -> str:
    """The name of the value that holds an entry."""
    return f"{_PREFIX}{key}"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
