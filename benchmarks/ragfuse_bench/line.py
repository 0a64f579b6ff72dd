"""A line to a server whose bandwidth changes as a trace says: a TCP proxy that hands on so many
bytes and no more.

All connections share it, both ways together. It may stand still, and break in the middle of what it
carries.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf
from random import Random
from threading import Event, Lock, Thread

TICK_S = 0.005
"""What is handed on at once is what the line carries in about this time."""
WINDOW_NBYTES = 1 << 16
"""What the line's own sockets hold of what is on its way."""
LEAST_NBYTES, MOST_NBYTES = 512, 1 << 18
RESET = struct.pack("ii", 1, 0)
"""Linger for no time: closing resets the connection."""


@dataclass(frozen=True)
class Trace:
    """Bandwidth over time: (from this second on, bytes a second), the first from 0 on, the last for
    good.
    """

    name: str
    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [at for at, _ in self.steps]
        if (
            not times
            or times[0] != 0
            or times != sorted(set(times))
            or min(rate for _, rate in self.steps) < 0
        ):
            raise ValueError(
                f"{self.name}: steps must begin at 0, go on in time, and carry 0 bytes a second or"
                " more."
            )

    def carried(self, seconds: float) -> float:
        """Bytes that pass until then."""
        ends = [*(at for at, _ in self.steps[1:]), inf]
        spans = (
            (at, min(end, seconds), rate) for (at, rate), end in zip(self.steps, ends, strict=True)
        )
        return sum(rate * (end - at) for at, end, rate in spans if end > at)

    def when(self, nbytes: float) -> float:
        """Seconds until so many bytes have passed; infinite if they never do."""
        ends, passed = [*(at for at, _ in self.steps[1:]), inf], 0.0
        for (at, rate), end in zip(self.steps, ends, strict=True):
            room = rate * (end - at) if rate else 0.0
            if rate and passed + room >= nbytes:
                return at + (nbytes - passed) / rate
            passed += room
        return inf

    def scaled(self, bandwidth: float, speed: float = 1.0) -> Trace:
        """So many times the bandwidth, changing so many times as fast."""
        return replace(self, steps=tuple((at / speed, rate * bandwidth) for at, rate in self.steps))

    def to_mean(self, rate: float, seconds: float) -> Trace:
        """Scaled to carry so much on average over its first seconds."""
        return self.scaled(rate * seconds / self.carried(seconds))

    def slow_start(self, first: float, every_s: float) -> Trace:
        """The same behind a beginning at `first` bytes a second, twice as many after each
        `every_s`, as TCP begins.
        """
        times, rate = list[float](), first
        while rate < self.rate(len(times) * every_s) and len(times) < 64:
            times.append(len(times) * every_s)
            rate *= 2
        begun = len(times) * every_s
        ramp = [(at, first * 2**n) for n, at in enumerate(times)]
        rest = [(at, rate) for at, rate in self.steps if at > begun]
        return replace(self, steps=(*ramp, (begun, self.rate(begun)), *rest))

    def rate(self, seconds: float) -> float:
        """Bytes a second at that time."""
        return next(rate for at, rate in reversed(self.steps) if at <= seconds)


def constant(rate: float) -> Trace:
    """Always the same."""
    return Trace(f"constant {rate:g}", ((0.0, rate),))


def drawn(seed: int, every_s: float, low: float, high: float, count: int = 200) -> Trace:
    """Uniformly random between two rates, anew after each `every_s` seconds (CacheGen 7.4: 0.1 to
    10 Gbit/s).
    """
    chance = Random(seed)
    return Trace(
        f"random {seed}", tuple((n * every_s, chance.uniform(low, high)) for n in range(count))
    )


def recorded(name: str, t_s_mbps: Sequence[tuple[float, float]]) -> Trace:
    """A trace of (seconds, Mbit/s), as they are published; it begins with its first second."""
    first = t_s_mbps[0][0]
    steps = {at - first: mbps * 1e6 / 8 for at, mbps in t_s_mbps}
    return Trace(name, tuple(sorted(steps.items())))


class Line:
    """To `port` of this machine by way of its own `port`, by a trace that begins when `start` is
    called.

    Before that, nothing holds anything up. carried: bytes handed on since then; log: (seconds,
        bytes) since then.
    """

    def __init__(self, port: int) -> None:
        self.log: list[tuple[float, int]] = []
        self.carried = 0
        self._to, self._began, self._used = port, 0.0, 0.0
        self._trace: Trace | None = None
        self._breaks: list[float] = []
        self._lock, self._closed, self._sockets = Lock(), Event(), set[socket.socket]()
        self._listener = _small(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, name="line", daemon=True).start()

    def start(self, trace: Trace | None, breaks: Sequence[float] = ()) -> None:
        """Go by `trace` from now on, None: as fast as it goes; all connections break once so many
        bytes passed.
        """
        with self._lock:
            self._trace, self._began, self._used = trace, time.monotonic(), 0.0
            self.carried, self.log, self._breaks = 0, [], sorted(breaks)

    def reset(self) -> None:
        """Break all connections now."""
        with self._lock:
            broken, self._sockets = self._sockets, set()
        for each in broken:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                each.shutdown(socket.SHUT_RD)  # wakes who waits for it, who closes it then

    def close(self) -> None:
        """End all connections, and take no more."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = _small(socket.socket())
                try:
                    far.connect(("127.0.0.1", self._to))
                except OSError:
                    near.close()
                    continue
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets |= {near, far}
                Thread(target=self._carry, args=(near, far), name="line", daemon=True).start()
                Thread(target=self._carry, args=(far, near), name="line", daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while data := here.recv(self._room()):
                if not self._wait(len(data)):
                    break
                there.sendall(data)
        with self._lock:
            whole = {here, there} <= self._sockets
            self._sockets -= {here, there}
        for each in (here, there):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR if whole else socket.SHUT_RD)
            each.close()

    def _room(self) -> int:
        """How much to take at once."""
        with self._lock:
            if self._trace is None:
                return MOST_NBYTES
            rate = self._trace.rate(time.monotonic() - self._began)
        return max(LEAST_NBYTES, min(MOST_NBYTES, int(rate * TICK_S)))

    def _wait(self, nbytes: int) -> bool:
        """Until the line has carried so many more; False where it breaks before."""
        with self._lock:
            trace, began = self._trace, self._began
            if trace is None:
                return True
            now = time.monotonic() - began
            # what was not used is gone
            self._used = max(self._used, trace.carried(max(0.0, now - TICK_S))) + nbytes
            due = began + trace.when(self._used)
        while (left := due - time.monotonic()) > 0:
            if self._closed.wait(min(left, 0.2)):
                return False
            if self._trace is not trace or self._began != began:
                break
        return self._passed(nbytes, began)

    def _passed(self, nbytes: int, began: float) -> bool:
        with self._lock:
            if began != self._began:
                return True
            self.log.append((time.monotonic() - began, nbytes))
            self.carried += nbytes
            breaks = bool(self._breaks) and self.carried >= self._breaks[0]
            if breaks:
                self._breaks.pop(0)
        if breaks:
            self.reset()
        return not breaks


@contextmanager
def line_to(port: int) -> Iterator[Line]:
    """A line that is closed in the end."""
    line = Line(port)
    try:
        yield line
    finally:
        line.close()


def _small(each: socket.socket) -> socket.socket:
    """A socket that holds little of what waits: what a line has not carried yet is with who sends
    it.
    """
    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_NBYTES)
    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_NBYTES)
    return each
