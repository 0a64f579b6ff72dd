"""The peers' processes: each in a group of its own, which ends with the benchmark, and speaks by
lines or by HTTP.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO

import psutil

from ragfuse.errors import RagFuseError

KEPT_LINES = 12
"""Last lines of a process's standard error that an error message shows."""
END_S = 3.0
"""Seconds that a process has to end by itself."""


class PeerError(RagFuseError):
    """A peer's process ended, failed or was silent for too long."""


class Peer(Protocol):
    """One way to answer prompts, in a process of its own."""

    version: str
    """What runs, by its own number."""
    disk_bytes: int
    """What it keeps of prompts and chunks on disk."""

    @property
    def process(self) -> PeerProcess:
        """Its process."""
        ...

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Make ready what can be of chunks that will recur; the figures of that."""
        ...

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the greedy answer's token ids; ends once nothing of it computes any more."""
        ...


class PeerProcess:
    """A process in a group of its own.

    Args:
        name: How error messages name it.
        command: What is run.
        environment: Variables in addition to those of this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(
                f"{name} cannot be started: {error}. Wanted a program at {command[0]}."
            ) from error
        self.lines: queue.Queue[str | None] = queue.Queue()
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._readers = [
            threading.Thread(target=self._read_lines, args=(self._popen.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._popen.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The number of the process, which is that of its group too."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._popen.poll() is None

    def write(self, line: str) -> None:
        """Send a line to its standard input."""
        pipe = self._popen.stdin
        assert pipe is not None
        try:
            pipe.write(line + "\n")
            pipe.flush()
        except OSError as error:
            raise self.failure("does not read what it is asked") from error

    def read(self, ends_s: float, what: str) -> str:
        """Return its next line; PeerError where none comes until `ends_s` (of `time.monotonic`)."""
        try:
            line = self.lines.get(timeout=max(0.0, ends_s - time.monotonic()))
        except queue.Empty:
            raise self.failure(f"was silent for too long while it {what}") from None
        if line is None:
            raise self.failure(f"ended while it {what}")
        return line

    def failure(self, what: str) -> PeerError:
        """Return an error that says what happened, with the last lines of its standard error."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(0.2)
        code = self._popen.poll()
        if code is not None:
            self._readers[1].join(1.0)
        said = "".join(f"\n  {line}" for line in self._last) or " nothing."
        how = "" if code is None else f" (exit code {code})"
        return PeerError(f"{self.name} {what}{how}. Its last lines:{said}")

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time of the process and those below it."""
        return sum(self._of_all(lambda each: float(sum(each.cpu_times()[:2]))))

    @property
    def resident_bytes(self) -> int:
        """Memory in RAM of the process and those below it."""
        return int(sum(self._of_all(lambda each: float(each.memory_info().rss))))

    def _of_all(self, figure: Callable[[psutil.Process], float]) -> list[float]:
        found: list[float] = []
        with suppress(psutil.Error):
            own = psutil.Process(self.pid)
            for each in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    found.append(figure(each))
        return found

    def close(self) -> None:
        """End the process and all of its group."""
        with suppress(OSError):
            if self._popen.stdin is not None:
                self._popen.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_S)

    def _read_lines(self, pipe: TextIO) -> None:
        for line in pipe:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self, pipe: TextIO) -> None:
        for line in pipe:
            if line.strip():
                self._last.append(line.rstrip()[:300])


class Worker:
    """A peer that speaks JSON lines, as `workers/wire.py` says.

    Args:
        process: Its process, just started.
        start_s: Seconds that it may take until it is ready.
        answer_s: Seconds that an answer may take.
    """

    def __init__(self, process: PeerProcess, start_s: float, answer_s: float) -> None:
        self._process, self._answer_s = process, answer_s
        self.disk_bytes = 0
        self.version = str(self._said(time.monotonic() + start_s, "started")["ready"])

    @property
    def process(self) -> PeerProcess:
        """Its process."""
        return self._process

    def hold(self, chunks: Sequence[str]) -> dict[str, Any]:
        """Have it make ready what it can of these chunks."""
        self._process.write(json.dumps({"hold": list(chunks)}))
        done: dict[str, Any] = self._said(
            time.monotonic() + 10 * self._answer_s, "encoded the chunks"
        )["done"]
        self.disk_bytes = done.pop("disk_bytes", 0)
        return done

    def answer(self, ids: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the tokens that it sends."""
        ends_s = time.monotonic() + self._answer_s
        self._process.write(json.dumps({"ids": list(ids), "max_tokens": max_tokens}))
        while "done" not in (said := self._said(ends_s, "answered")):
            yield int(said["token"])
        self.disk_bytes = said["done"].get("disk_bytes", 0)

    def _said(self, ends_s: float, what: str) -> dict[str, Any]:
        line = self._process.read(ends_s, what)
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict) or not {"ready", "done", "token"} & said.keys():
            raise self._process.failure(
                f"said what is no line of the benchmark's while it {what}: {line.strip()[:200]}"
            )
        return said
