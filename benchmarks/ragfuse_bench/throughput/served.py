"""`ragfuse serve` in a process of its own, with a folder of its own that is gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragfuse.errors import RagFuseError
from ragfuse.settings import PREFIX, Settings

SERVE = "from ragfuse.cli import app; app()"
STARTED_S, ENDED_S = 600.0, 30.0
WAITING = 100_000
"""Requests that wait, at most: an open loop shall lose none."""
TOLD = " answers at "


@dataclass(frozen=True)
class Serving:
    """A server that runs: the number of its process, its host and port."""

    pid: int
    place: tuple[str, int]


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
            yield Serving(process.pid, _place(process, said))
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
