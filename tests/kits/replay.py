"""Streams in virtual time: the product's own decisions, over lines of any length, with no waiting
and no chance.

A `Replayed` stream is a `Stream` but for its reads, which a simulated line carries, and for
decoding, which is left out. All reads that are under way share the line evenly. Nothing is
computed: what that would take is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from ragfuse_bench.line import constant
from ragfuse_bench.stream.lines import Course, Scale

from ragfuse.load.stream import Link, PendingRead, Stream
from ragfuse.plan.stream_level import StreamPart
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch

LAYERS, PIECES, TOKENS = 30, 6, 1020
INT8 = 72_839_570
OVER_INT8 = {"int8": 1.0, "cg1": 0.428, "cg2": 0.273, "cg3": 0.231, "cg4": 0.175}
"""Bytes of a context of 6,100 tokens in 8 bits, and shares of these by level:
docs/benchmarks/stream.json.
"""
TEXT_S, BASE_S, ROUND_TRIP_S = 79.6, 0.93, 0.004
"""Seconds to prefill such a context on the machine of that run, and to compute a prompt whose KV is
all there.
"""
SCALE = Scale(INT8, TEXT_S)


class Time:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Flow:
    """Bytes on their way."""

    left: float
    came: Callable[[], None]
    is_over: bool = False


class SharedLine:
    """Goes by a course: with `rates`, as `bench.stream` does, at that of the piece whose read began
    last.
    """

    def __init__(self, course: Course, time: Time) -> None:
        self._course, self._time, self._trace, self._began = course, time, course.first, 0.0
        self._piece: int | None = None
        self._flows: list[Flow] = []

    def begin(self, piece: int, nbytes: float, came: Callable[[], None]) -> Flow:
        if self._course.rates and piece != self._piece:
            self._piece, self._began = piece, self._time.now
            self._trace = constant(self._course.rates[piece])
        self._flows.append(Flow(nbytes, came))
        return self._flows[-1]

    def run(self, until: float, flow: Flow) -> bool:
        """Let time go on until a flow is over, or until then; whether it is."""
        while not flow.is_over and self._time.now < until:
            at = self._time.now - self._began
            change = next(
                (self._began + step for step, _ in self._trace.steps if step > at + 1e-9), inf
            )
            each = self._trace.rate(at + 1e-9) / len(self._flows)
            least = min(self._flows, key=lambda one: one.left)
            end = min(until, change, self._time.now + least.left / each if each else inf)
            assert end < inf, "the line stands still for good"
            for one in self._flows:
                one.left -= (end - self._time.now) * each
            self._time.now = end
            if least.left <= 1e-6:
                self._flows.remove(least)
                least.is_over = True
                least.came()
        return flow.is_over


@dataclass
class Done:
    """The event of a read."""

    line: SharedLine
    time: Time
    flow: Flow

    def wait(self, timeout: float | None = None) -> bool:
        return self.line.run(inf if timeout is None else self.time.now + timeout, self.flow)


@dataclass(frozen=True)
class Came:
    """A segment as it was read."""

    nbytes: int


class Replayed(Stream):
    """A stream over a simulated line."""

    def __init__(self, line: SharedLine, time: Time, parts: Any, deadline_s: float) -> None:
        super().__init__(None, parts, LAYERS, Link(clock=time), deadline_s, BASE_S, clock=time)  # type: ignore[arg-type]
        self._line, self._time = line, time

    def _start(self, reading: PendingRead) -> PendingRead:
        (segment,) = reading.part.segments
        nbytes = round(INT8 / PIECES * OVER_INT8[reading.level])

        def came() -> None:
            reading.ended = self._time.now
            reading.received = Came(nbytes)  # type: ignore[assignment]

        self._time.now += ROUND_TRIP_S
        reading.began = self._time.now
        flow = self._line.begin(segment, nbytes, came)
        reading.done = Done(self._line, self._time, flow)  # type: ignore[assignment]
        return reading

    def _decode_later(self, encoded: Any) -> list[Any]:
        return []


def replayed(
    course: Course, deadline_s: float, level: str | None = None, longer: float = 1.0
) -> tuple[float, Stream]:
    """Return the seconds to the first token, and the stream.

    Args:
        course: What the line carries.
        deadline_s: Seconds to the first token.
        level: The only level that is stored, where pieces cannot be recomputed; None: all levels,
            and text.
        longer: How many times as long as predicted computing takes.
    """
    time, text_s = Time(), TEXT_S / PIECES
    sizes = {name: round(INT8 / PIECES * share) for name, share in OVER_INT8.items()}
    stored = sizes if level is None else {level: sizes[level]}
    parts = list[StreamPart]()
    for at in range(PIECES):
        fetch = Fetch(
            at,
            ChunkKey("model", str(at)),
            "line",
            "int8",
            sizes["int8"],
            TOKENS,
            tuple(stored.items()),
        )
        parts.append(StreamPart(fetch, (at,), TOKENS, text_s if level is None else None))
    with Replayed(SharedLine(course, time), time, parts, deadline_s) as stream:
        stream.run()
    return time.now + longer * (BASE_S + text_s * len(stream.text)), stream
