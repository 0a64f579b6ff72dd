"""Stream KV over a link, entry by entry, under a deadline (CacheGen 5.3).

Entries are read one after another, each in its own thread, while other threads decode.
`plan.stream_level` chooses each entry's level from the measured throughput. An entry that takes too
long or cannot be read is recomputed in the prefill. After all entries have been read, the lossiest
entries are read again at better levels while time is left.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Lock

import torch

from ragfuse.plan.stream_level import (
    AS_TEXT,
    BACKOFF,
    COMPUTE_MARGIN,
    StreamPart,
    better_level,
    first_level,
    first_look_s,
    is_given_up,
)
from ragfuse.store import EncodedLayers, KVStore
from ragfuse.types.answer import PieceTrace
from ragfuse.types.choices import loss
from ragfuse.types.kv import Layer, LayerKV

CPU = torch.device("cpu")
KNOWN_S = 10.0
"""Seconds after which a measured throughput expires and counts as unknown."""


class Link:
    """The network link to one tier, with its measured throughput. Thread-safe.

    Args:
        max_streams: Maximum concurrent reads (B in the CacheGen paper); further reads wait.
        clock: Returns the time in seconds.

    Attributes:
        slot: A semaphore that a thread holds while it reads.
    """

    def __init__(self, max_streams: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_streams, self._clock = max_streams, clock
        self._seen: tuple[float, float] | None = None
        self.slot = BoundedSemaphore(max_streams)
        self._streams, self._lock = 0, Lock()

    @property
    def throughput(self) -> float | None:
        """Bytes per second of all streams together; None if not measured in the past `KNOWN_S`."""
        seen = self._seen
        return seen[0] if seen is not None and self._clock() - seen[1] < KNOWN_S else None

    @property
    def sharing(self) -> int:
        """Number of open streams (N_c in the CacheGen paper), including the caller's stream."""
        return max(1, self._streams)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Add one to the number of open streams inside the `with` block."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1

    def record(self, nbytes: int, seconds: float) -> float:
        """Record one stream's read; return the link's throughput in bytes per second.

        The link's throughput is the stream's throughput times the number of concurrent streams.
        """
        with self._lock:
            carried = nbytes / max(seconds, 1e-9) * max(1, min(self._streams, self._max_streams))
            self._seen = carried, self._clock()
            return carried


log = logging.getLogger("ragfuse.load")

DECODERS = min(4, os.cpu_count() or 1)
"""Number of threads that decode layers."""
DEADLINE_MARGIN = 0.05
"""Share of the deadline that is kept in reserve, in case computing takes longer than predicted."""

COMPUTED = "computed instead of read, to meet the deadline"
GIVEN_UP = "not used, because the stored bytes arrived too slowly"
BYTES_UNREADABLE = "the stored bytes could not be read"
NOT_WAITED_FOR = "not read further, because the deadline is near; the KV read so far is used"


@dataclass
class PendingRead:
    """A read of a `StreamPart`, in progress or ended. All times are from the stream's clock.

    Args:
        part: The part to read.
        level: Codec level to read.
        requested: Time of the request.
        received: The encoded layers, from arrival until decoding starts; None at all other times.
        done: An event that is set when the read has ended.
        began: Time at which the read got a slot of the link; None before that time.
        ended: Time at which the read ended.
        nbytes: Bytes of all reads of the part so far.
        layers: The decoded layers, as futures of the decoding threads.
    """

    part: StreamPart
    level: str
    requested: float
    received: EncodedLayers | None = None
    done: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    ended: float | None = None
    nbytes: int = 0
    layers: list[Future[LayerKV]] = field(default_factory=list)


class Stream:
    """Streams segments over one link. In the `with` block, call `run` once, then `read` per layer.

    Args:
        store: The store that has the KV of the segments.
        parts: The entries to read with their costs, in streaming order.
        n_layers: Number of layers of the model.
        link: The link to the tier that has all parts.
        deadline_s: Seconds from now to the first token.
        base_s: Seconds of computing after streaming if all parts are read.
        prior: Assumed throughput before the first read, in bytes per second. None means unknown.
        device: The device that needs the layers.
        clock: Returns the time in seconds.

    Attributes:
        pieces: The trace of every read and decision, in order.
        prior: The argument `prior`.
        text: Reasons for recomputing segments, by segment index.
        load_s: Seconds that `run` took.
    """

    def __init__(
        self,
        store: KVStore,
        parts: Sequence[StreamPart],
        n_layers: int,
        link: Link,
        deadline_s: float,
        base_s: float = 0.0,
        prior: float | None = None,
        device: torch.device = CPU,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pieces: list[PieceTrace] = []
        self.text: dict[int, str] = {}
        self.load_s = 0.0
        self.prior = prior
        self._store, self._n_layers, self._link = store, n_layers, link
        self._parts, self._device, self._clock = parts, device, clock
        self._began_s, self._deadline_s, self._compute_s = clock(), deadline_s, base_s
        self._decoders = ThreadPoolExecutor(DECODERS, "ragfuse-decode")
        self._arrived: dict[int, PendingRead] = {}  # latest read by first segment of the part

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._decoders.shutdown(cancel_futures=True)
        for arrived in self._arrived.values():
            arrived.layers.clear()

    @property
    def received(self) -> dict[int, tuple[str, int]]:
        """(level, bytes read) by segment. An entry's bytes count for its first segment only."""
        return {
            segment: (arrived.level, 0 if number else arrived.nbytes)
            for arrived in self._arrived.values()
            for number, segment in enumerate(arrived.part.segments)
        }

    def run(self) -> None:
        """Read every part, or mark the part for recomputation. Sets `pieces`, `text`, `load_s`."""
        began = self._clock()
        with self._link.joined():
            for number in range(len(self._parts)):
                self._stream_part(self._parts[number:])
            self._refine()
        self.load_s = self._clock() - began

    def read(self, layer: int) -> Layer:
        """Wait until a layer is decoded; return its KV by segment, None where decoding failed."""
        found = dict[int, LayerKV | None]()
        for at, arrived in self._arrived.items():
            if arrived.layers:
                found |= dict.fromkeys(
                    arrived.part.segments, self._decoded(at, arrived.layers[layer])
                )
        return found

    # deciding

    def _lossy(self) -> list[StreamPart]:
        """Return the lossiest of the parts that were read and are also stored at a better level."""
        found = [
            (loss(arrived.level), arrived.part)
            for arrived in self._arrived.values()
            if arrived.level != next(iter(arrived.part.sizes))
        ]
        worst = max((rank for rank, _ in found), default=0)
        return [part for rank, part in found if rank == worst > 0]

    def _time_left_s(self) -> float:
        """Return the seconds left for reading: deadline minus elapsed time, margin and compute."""
        return (
            self._began_s
            + (1 - DEADLINE_MARGIN) * self._deadline_s
            - self._clock()
            - self._compute_s
        )

    @property
    def _throughput(self) -> float | None:
        """Bytes per second for this stream: the link's throughput divided among all streams."""
        seen = self._link.throughput
        found = self.prior if seen is None else seen
        return None if found is None else found / self._link.sharing

    def _compute(self, part: StreamPart, why: str) -> None:
        self._compute_s += COMPUTE_MARGIN * (part.text_s or 0.0)
        self.text |= dict.fromkeys(part.segments, why)
        began_s = self._clock() - self._began_s
        self.pieces.append(
            PieceTrace(part.segments, part.tokens, AS_TEXT, began_s=began_s, why=why)
        )

    # reading

    def _stream_part(self, remaining: Sequence[StreamPart]) -> None:
        part = remaining[0]
        level = first_level(remaining, self._throughput, self._time_left_s(), not self._lossy())
        if level == AS_TEXT:
            self._compute(part, COMPUTED)
            return
        reading = self._start(PendingRead(part, level, self._clock()))
        why = BYTES_UNREADABLE if self._wait(reading, remaining) else GIVEN_UP
        if not self._keep(reading, why):
            self._compute(part, why)

    def _refine(self) -> None:
        """While time is left, read the lossiest parts again at the best level that fits."""
        while (remaining := self._lossy()) and (throughput := self._throughput) is not None:
            worst = loss(self._arrived[remaining[0].segments[0]].level)
            better = [level for level in remaining[0].sizes if loss(level) < worst]
            level = better_level(remaining, better, throughput, self._time_left_s())
            if not level:
                return
            reading = self._start(PendingRead(remaining[0], level, self._clock()))
            is_done = reading.done.wait(max(0.0, self._time_left_s()))
            if not self._keep(reading, BYTES_UNREADABLE if is_done else NOT_WAITED_FOR):
                return

    def _start(self, reading: PendingRead) -> PendingRead:
        threading.Thread(
            target=self._run, args=(reading,), name="ragfuse-stream", daemon=True
        ).start()
        return reading

    def _wait(self, reading: PendingRead, remaining: Sequence[StreamPart]) -> bool:
        """Wait for a read. Return False if the read is given up because it is too slow."""
        wait_s = first_look_s(reading.part, reading.level, self._throughput)
        while not reading.done.wait(wait_s):
            waited_s = self._clock() - reading.requested
            if is_given_up(remaining, reading.level, waited_s, self._time_left_s()):
                if reading.began is not None:
                    nbytes = reading.part.sizes[reading.level]
                    self._link.record(nbytes, self._clock() - reading.began)
                return False
            wait_s = waited_s * (BACKOFF - 1)
        return True

    def _run(self, reading: PendingRead) -> None:
        """Read one part, in its own thread; never raises."""
        try:
            with self._link.slot:
                reading.began, fetch = self._clock(), reading.part.fetch
                reading.received = self._store.read_encoded(
                    fetch.key, 0, self._n_layers, fetch.tier, reading.level
                )
        except Exception as error:
            log.warning(
                "Stored KV could not be read at level %s, so its text is computed: %s",
                reading.level,
                error,
            )
        finally:
            reading.ended = self._clock()
            reading.done.set()

    def _keep(self, reading: PendingRead, why: str) -> bool:
        """Record a read's trace and throughput and start decoding; return whether the part arrived.

        Throughput is measured from the time at which the read got a slot of the link. The trace
        includes the wait for that slot. `why` is traced as the reason if the part did not arrive.
        """
        ended, sharing, throughput, nbytes = self._clock(), self._link.sharing, None, 0
        part, found = reading.part, None if why == GIVEN_UP else reading.received
        if found is not None and reading.began is not None:
            nbytes, seconds = found.nbytes, min(ended, reading.ended or ended) - reading.began
            throughput = self._link.record(nbytes, seconds)
        self.pieces.append(
            PieceTrace(
                part.segments,
                part.tokens,
                reading.level,
                nbytes,
                reading.requested - self._began_s,
                ended - reading.requested,
                throughput,
                sharing,
                why if found is None else "",
            )
        )
        if found is None:
            return False
        before = self._arrived.get(part.segments[0])
        for layer in before.layers if before is not None else ():
            layer.cancel()
        reading.nbytes = nbytes + (before.nbytes if before is not None else 0)
        reading.layers = [
            self._decoders.submit(self._decode, found, layer) for layer in range(self._n_layers)
        ]
        reading.received = None  # so that the encoded bytes are freed after decoding
        self._arrived[part.segments[0]] = reading
        return True

    # decoding

    def _decode(self, encoded: EncodedLayers, at: int) -> LayerKV:
        (kv,) = encoded.decoded(range(at, at + 1))
        return LayerKV(kv.keys.to(self._device), kv.values.to(self._device))

    def _decoded(self, segment: int, layer: Future[LayerKV]) -> LayerKV | None:
        try:
            return layer.result()
        except Exception as error:
            log.warning(
                "Stored KV of segment %d cannot be decoded, so its text is computed: %s",
                segment,
                error,
            )
            return None
