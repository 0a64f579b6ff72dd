"""`ragfuse serve` in a process of its own, with a folder of its own that is gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from ragfuse_bench.presets import preset

from ragfuse.errors import InputError, RagFuseError, SettingsError
from ragfuse.settings import PREFIX, Settings

SERVE = "from ragfuse.cli import app; app()"
STARTED_S, ENDED_S = 600.0, 30.0
WAITING = 100_000
"""Requests that wait, at most: an open loop shall lose none."""
TOLD = " answers at "


class Serving:
    """A server that runs. place: its host and port. rss: bytes that the process had, (when, bytes),
    once watched.
    """

    def __init__(self, process: subprocess.Popen[bytes], place: tuple[str, int]) -> None:
        self.place, self.rss = place, list[tuple[float, int]]()
        self._process = process

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @contextmanager
    def watched(self, every_s: float = 1.0) -> Iterator[None]:
        """Note how much memory the process has, again and again, by the monotonic clock."""
        over, process = threading.Event(), psutil.Process(self._process.pid)

        def look() -> None:
            while not over.is_set():
                try:
                    self.rss.append((time.monotonic(), process.memory_info().rss))
                except psutil.Error:
                    return
                over.wait(every_s)

        thread = threading.Thread(target=look, name="bench-rss", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def require_server(settings: Settings) -> None:
    """SettingsError for a model without words; InputError where a server's packages are missing."""
    if preset(settings.model) is not None:
        raise SettingsError(
            f"'{settings.model}' has no words to ask it with; name an embedded model, an id or a"
            " folder."
        )
    missing = next(
        (name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None),
        None,
    )
    if missing is not None:
        raise InputError(
            f"A server needs the package {missing}, which is not installed: pip install"
            " 'ragfuse-kv[serve]'"
        )


@contextmanager
def serving(
    settings: Settings, threads: int, patience_s: float, **changes: Any
) -> Iterator[Serving]:
    """A server over an empty store in memory, as large as the settings say; ended and forgotten in
    any case.
    """
    with tempfile.TemporaryDirectory(prefix="ragfuse-load-") as folder:
        told = {
            **{
                name: getattr(settings, name)
                for name in ("model", "dtype", "device", "home", "memory_bytes")
            },
            **{
                "store": Path(folder) / "store",
                "disk_bytes": 0,
                "tiers": "[]",
                "levels": "{}",
                "salt": "",
            },
            **{
                "model": _from_anywhere(settings.model),
                "serve_grace_s": 0,
                "serve_waiting": WAITING,
                "serve_timeout_s": patience_s,
                "api_keys": "",
                **changes,
            },
        }
        said = Path(folder) / "said"
        with said.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, "serve", "--port", "0"],
                env=_environment(told, threads),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,  # no ragfuse.toml of anybody's
            )
        try:
            yield Serving(process, _place(process, said))
        finally:
            _end(process)


def _from_anywhere(model: str) -> str:
    """A folder by its whole path, a name as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _environment(told: Mapping[str, Any], threads: int) -> dict[str, str]:
    """This process's, with these settings and no others."""
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)
    }
    path = os.pathsep.join(str(Path(each).resolve()) for each in sys.path if each)
    mine = {f"{PREFIX}{name.upper()}": str(value) for name, value in told.items()}
    return {**kept, **mine, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "COLUMNS": "1000"}


def _place(process: subprocess.Popen[bytes], said: Path) -> tuple[str, int]:
    """Where it answers, once it does; RagFuseError, with what it said, where it never will."""
    until_s = time.monotonic() + STARTED_S
    while time.monotonic() < until_s:
        text = said.read_text("utf-8", "replace")
        if TOLD in text and "/v1" in text.partition(TOLD)[2]:
            host, _, port = (
                text.partition(TOLD)[2].partition("/v1")[0].removeprefix("http://").rpartition(":")
            )
            return host, int(port)
        if process.poll() is not None:
            raise RagFuseError(f"The server did not begin: {text[-1000:].strip()}")
        time.sleep(0.1)
    raise RagFuseError(f"The server did not begin within {STARTED_S:g} s. Try a smaller model.")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(ENDED_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:  # Ctrl-C, once more
        process.kill()
        process.wait()
        raise
