"""A Redis server of one's own, for as long as it is needed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragfuse.errors import SettingsError

STARTS_S = 20.0


def require_redis() -> str:
    """The path of redis-server; SettingsError if there is none."""
    program = shutil.which("redis-server")
    if program is None:
        raise SettingsError(
            "This is measured over a real Redis, and redis-server is not installed: install it"
            " first."
        )
    return program


@contextmanager
def redis_server(home: Path) -> Iterator[int]:
    """The port of an empty server on this machine that writes nothing to disk; SettingsError if
    there is none.
    """
    program = require_redis()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="redis-", dir=home) as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        quiet = [
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            folder,
            "--logfile",
            str(Path(folder) / "log"),
        ]
        process = subprocess.Popen(
            [program, "--port", str(port), "--bind", "127.0.0.1", *quiet], stdout=subprocess.DEVNULL
        )
        try:
            _wait(port, process)
            yield port
        finally:
            process.kill()
            process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + STARTS_S
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as near:
            if near.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise SettingsError(f"redis-server did not start within {STARTS_S:g} s.")
