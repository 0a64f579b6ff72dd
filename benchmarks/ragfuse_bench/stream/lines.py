"""The bandwidths that streams go by, and how the paper's are scaled to what this machine computes.

The paper's figures are in Gbit/s and seconds for a GPU. Here both are scaled by one factor each,
the same for every method: so much bandwidth that loading 8-bit KV takes the same share of
prefilling the text, and so much time that prefilling takes as long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from ragfuse_bench.line import Line, Trace, constant, recorded

from ragfuse.store.redis import RedisTier
from ragfuse.types.keys import ChunkKey

PAPER_GBPS = 3.0
PAPER_MB = 622.0
"""8-bit KV of Mistral-7B on LongChat (the paper's table 1)."""
PAPER_LOAD_OVER_TEXT = 0.456
"""T_load(8 bit) / T_prefill(text) at 3 Gbit/s, see `DERIVED`."""
LOW_GBPS, HIGH_GBPS = 0.1, 10.0
"""The paper draws bandwidths from between these, one for each piece (section 7.4)."""
STEP_S = 0.25
"""Seconds of the paper's that a value of a published trace lasts, in the middle: as often as a
piece takes then.
"""
DERIVED = (
    "Loading 8-bit KV of Mistral-7B on LongChat takes 622 MB / 3 Gbit/s = 1.66 s (table 1). Section"
    " 7.2 has CacheGen 1.67 to 1.81 times faster than 8 bits and 3.1 to 4.7 times faster than text"
    " at that bandwidth, so 8 bits take 1.67/4.7 = .36 to 1.81/3.1 = .58 of text's time; their"
    " geometric mean, .456, gives 3.6 s for text. The figure that shows it is not in the text of"
    " the paper. Both scales hold for all methods."
)


@dataclass(frozen=True)
class Scale:
    """What the paper's bandwidths and seconds are here. int8_nbytes: of one context; text_s: to
    prefill it here.
    """

    int8_nbytes: float
    text_s: float

    @property
    def bytes_per_gbps(self) -> float:
        """Bytes a second here for each Gbit/s of the paper's."""
        return self.int8_nbytes / (PAPER_LOAD_OVER_TEXT * self.text_s) / PAPER_GBPS

    @property
    def seconds(self) -> float:
        """Seconds here for each of the paper's."""
        return self.text_s / self.paper_text_s

    @property
    def paper_text_s(self) -> float:
        """Seconds to prefill the paper's text there."""
        return 8e6 * PAPER_MB / (PAPER_GBPS * 1e9) / PAPER_LOAD_OVER_TEXT

    def as_dict(self) -> dict[str, Any]:
        """With where it is from."""
        told = {
            "load_over_text": PAPER_LOAD_OVER_TEXT,
            "paper_text_s": self.paper_text_s,
            "derived": DERIVED,
        }
        return {
            **asdict(self),
            "bytes_per_gbps": self.bytes_per_gbps,
            "seconds_per_second": self.seconds,
            **told,
        }


@dataclass(frozen=True)
class Course:
    """What a line does while one stream goes over it: by time (`trace`), or by piece (`rates`,
    bytes a second).
    """

    name: str
    kind: str
    trace: Trace | None = None
    rates: tuple[float, ...] = ()

    @property
    def first(self) -> Trace:
        """What it does before the first piece."""
        return self.trace if self.trace is not None else constant(self.rates[0])


def drawn_by_piece(seed: int, n_pieces: int, scale: Scale) -> Course:
    """The paper's: for each piece a bandwidth between 0.1 and 10 Gbit/s."""
    chance = Random(seed)
    rates = tuple(
        chance.uniform(LOW_GBPS, HIGH_GBPS) * scale.bytes_per_gbps for _ in range(n_pieces)
    )
    return Course(f"random {seed}", "random", None, rates)


def published(scale: Scale, gbps: float) -> Iterator[Course]:
    """Measured bandwidths that come along, brought to `gbps` on average and to the paper's
    speed.
    """
    for number, (name, steps) in enumerate(_traces()):
        trace = recorded(name, steps)
        times = sorted(b[0] - a[0] for a, b in zip(trace.steps, trace.steps[1:], strict=False))
        step_s = times[len(times) // 2] if times else 1.0
        quick = trace.scaled(1.0, step_s / (STEP_S * scale.seconds))
        last = quick.steps[-1][0]
        if not quick.carried(last):
            continue
        yield Course(
            f"{name} {number}", "measured", quick.to_mean(gbps * scale.bytes_per_gbps, last)
        )


def _traces() -> Iterator[tuple[str, list[tuple[float, float]]]]:
    own = Path(str(files("ragfuse_bench"))) / "sets" / "bandwidth.json"
    for each in json.loads(own.read_text("utf-8"))["traces"]:
        yield each["set"], [(float(at), float(mbps)) for at, mbps in each["t_s_mbps"]]


class PacedTier(RedisTier):
    """Redis behind a line whose bandwidth changes with each piece that is read, where a course says
    so.
    """

    line: Line | None = None
    course: Course | None = None
    order: tuple[ChunkKey, ...] = ()
    _at = -1

    def go(self, line: Line, course: Course, order: Iterable[ChunkKey]) -> None:
        """One stream of these pieces follows."""
        self.line, self.course, self.order, self._at = line, course, tuple(order), -1
        line.start(course.first)

    def get(self, key: ChunkKey, layers: range, level: str | None = None) -> Any:
        """As Redis does, at the bandwidth of this piece."""
        if (
            self.course is not None
            and self.course.rates
            and self.line is not None
            and key in self.order
        ):
            at = self.order.index(key)
            if at != self._at:
                self._at = at
                self.line.start(constant(self.course.rates[at % len(self.course.rates)]))
        return super().get(key, layers, level)
