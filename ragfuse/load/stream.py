"""Stream KV over a link in pieces, each at the level that the deadline allows, or computed instead (CacheGen 5.3).

A piece is a run of segments of about 1,500 tokens. Pieces are read one after the other, a few layers at a time, each
read on its own thread, and other threads decode meanwhile. `plan.stream_level` decides from the measured throughput how
the next layers come. A piece that takes too long, or cannot be read, becomes text: it is recomputed in the prefill.
Once every piece is there, the lossiest ones are read again at better levels while time is left.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ragfuse.load.layers import CPU
from ragfuse.load.link import Link
from ragfuse.load.staging_buffer import Layer
from ragfuse.plan.stream_level import (
    AS_TEXT,
    BACKOFF,
    COMPUTE_MARGIN,
    MIN_THROUGHPUT,
    PIECE_TOKENS,
    StreamPart,
    StreamPiece,
    better_level,
    first_level,
    first_look_s,
    is_given_up,
    layers_together,
    pieces,
)
from ragfuse.store import EncodedLayers, KVStore
from ragfuse.types.answer import PieceTrace
from ragfuse.types.kv import LayerKV
from ragfuse.types.levels import loss
from ragfuse.types.plan import Fetch

log = logging.getLogger("ragfuse.load")

DECODERS = max(1, min(4, os.cpu_count() or 1))
"""Threads that decode the layers that were read."""
DEADLINE_MARGIN = 0.05
"""Share of the deadline kept in reserve, as computing may take a little longer than predicted."""

COMPUTED = "computed, which meets the deadline"
GIVEN_UP = "given up, as its bytes came too slowly"
BYTES_UNREADABLE = "its bytes could not be read"
NOT_WAITED_FOR = "not waited for, as the deadline is near: what was read before is used"


@dataclass(frozen=True)
class Terms:
    """The terms of a stream.

    Args:
        began_s: `clock()` when the deadline began to run.
        deadline_s: Seconds from then to the first token.
        base_s: Seconds that the prompt computes in any case after the last piece.
        piece_tokens: Tokens of a piece, about.
        prior: Assumed throughput of the link before anything was read, in bytes per second; None: unknown.
    """

    began_s: float
    deadline_s: float
    base_s: float = 0.0
    piece_tokens: int = PIECE_TOKENS
    prior: float | None = None


@dataclass
class PendingRead:
    """A read of some layers of a piece that is under way. Times are those of the stream's clock, in seconds.

    Args:
        segments: Segments to read.
        span: The first layer, and the one after the last.
        level: Codec level to read.
        requested: When the read was requested.
        received: What has arrived so far, by segment.
        done: Set when the read has ended.
        stop: Set to end the read after the current segment.
        began: When it got its turn on the link; None while it waits for it.
        ended: When the read ended.
    """

    segments: tuple[int, ...]
    span: tuple[int, int]
    level: str
    requested: float
    received: dict[int, EncodedLayers] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    ended: float | None = None


class Stream:
    """A stream of segments over one link. A context manager: call `run` in it, then `read` each layer.

    Args:
        store: Where the segments are stored.
        fetches: The segments to read.
        parts: The same segments with sizes and costs, in the order of streaming.
        n_layers: Layers of the model.
        link: The link to their tier.
        terms: The deadline, and what is known before anything is read.
        device: The device that needs the layers.
        clock: Returns the time in seconds; that of `terms.began_s`.

    Attributes:
        pieces: The trace of every read and decision, in order.
        text: Segments that are to be computed instead, with the reason.
        received: By segment that was read, its lossiest level and its bytes.
        load_s: Seconds until the last piece had been read.
        wait_s: Seconds that `read` has waited for decoding.
    """

    def __init__(
        self,
        store: KVStore,
        fetches: Sequence[Fetch],
        parts: Sequence[StreamPart],
        n_layers: int,
        link: Link,
        terms: Terms,
        device: torch.device = CPU,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pieces: list[PieceTrace] = []
        self.text: dict[int, str] = {}
        self.received: dict[int, tuple[str, int]] = {}
        self.load_s = self.wait_s = 0.0
        self._store, self._fetches = store, {fetch.segment: fetch for fetch in fetches}
        self._n_layers = n_layers
        self._pieces, self._link, self.terms = pieces(parts, terms.piece_tokens), link, terms
        self._sharers = {part.segment: part.also for part in parts}
        self._tokens = {part.segment: part.tokens for part in parts}
        self._device, self._clock = device, clock
        self._compute_s = terms.base_s
        self._decoders = ThreadPoolExecutor(DECODERS, "ragfuse-decode")
        self._decoding: dict[int, dict[int, Future[LayerKV]]] = {}
        self._levels: dict[int, dict[int, str]] = {}
        self._nbytes: dict[int, int] = {}

    def close(self) -> None:
        """Stop decoding and release all layers. A read that was given up ends when its tier returns."""
        self._decoders.shutdown(cancel_futures=True)
        self._decoding = {}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Read every piece, or decide that it is computed instead. The class's attributes hold the outcome."""
        began = self._clock()
        with self._link.joined():
            for number, piece in enumerate(self._pieces):
                self._stream_piece(piece, self._pieces[number + 1 :])
            self._refine()
        for segment in self._decoding:
            level = max(dict.fromkeys(self._levels[segment].values()), key=loss)
            self.received[segment] = level, self._nbytes[segment]
            self.received |= dict.fromkeys(self._sharers[segment], (level, 0))
        self.load_s = self._clock() - began

    def read(self, layer: int) -> Layer:
        """Return one layer's KV by segment that was read, waiting until it is decoded; None if it cannot be decoded."""
        began = self._clock()
        found = {segment: self._decoded(segment, layers[layer]) for segment, layers in self._decoding.items()}
        found |= {other: kv for segment, kv in found.items() for other in self._sharers[segment]}
        self.wait_s += self._clock() - began
        return found

    # deciding

    def _worst_loss(self) -> int:
        """Return the loss rank of the lossiest level that was read and has a better one stored; 0 if there is none."""
        return max(map(loss, {level for piece in self._pieces for level, _, _ in self._worse(piece)}), default=0)

    def _worse(self, piece: StreamPiece) -> Iterator[tuple[str, int, int]]:
        """Yield (level, segment, layer) of what was read of a piece at another level than its best stored one."""
        best = next(iter(piece.sizes), "")
        for segment in piece.segments:
            if segment in self._decoding:
                yield from ((level, segment, at) for at, level in self._levels[segment].items() if level != best)

    def _time_left_s(self) -> float:
        """Return the seconds left for reading: until the deadline, less its margin and all computing decided so far."""
        return self.terms.began_s + (1 - DEADLINE_MARGIN) * self.terms.deadline_s - self._clock() - self._compute_s

    @property
    def _throughput(self) -> float | None:
        seen = self._link.throughput
        return self.terms.prior if seen is None else seen

    def _compute(self, piece: StreamPiece, segments: Sequence[int], why: str) -> None:
        """Decide that segments are computed, and discard what was read of them."""
        rest = piece.rest(segments, 1.0)
        self._compute_s += COMPUTE_MARGIN * (rest.text_s or 0.0)
        self.text |= dict.fromkeys(self._with_others(segments), why)
        for segment in segments:
            self._decoding.pop(segment, None)
        began_s = self._clock() - self.terms.began_s
        self.pieces.append(PieceTrace(self._with_others(segments), rest.tokens, AS_TEXT, began_s=began_s, why=why))

    def _with_others(self, segments: Sequence[int]) -> tuple[int, ...]:
        """Return these segments, and those that use rows of the same entries."""
        return tuple(each for segment in segments for each in (segment, *self._sharers[segment]))

    # reading

    def _stream_piece(self, piece: StreamPiece, later: Sequence[StreamPiece]) -> None:
        """Read a piece, some layers at a time, until it is complete or computed instead."""
        wanted, at, n_layers = list(piece.segments), 0, self._n_layers
        while wanted and at < n_layers:
            remaining = [piece.rest(wanted, (n_layers - at) / n_layers), *later]
            is_whole = not at and not self._worst_loss()
            known = self._throughput, self._time_left_s(), self._link.sharing
            level = first_level(remaining, *known, is_whole)
            if level == AS_TEXT:
                self._compute(piece, wanted, COMPUTED if piece.sizes else BYTES_UNREADABLE)
                return
            end = at + self._layers_a_read(remaining[0], level, at)
            reading = self._start(PendingRead(tuple(wanted), (at, end), level, self._clock()))
            in_time = self._wait(reading, remaining)
            received = dict(reading.received) if in_time else {}
            self._decode_later(received, level)
            why = BYTES_UNREADABLE if in_time else GIVEN_UP
            self._note(reading, received, self._clock(), why)
            if lost := [segment for segment in wanted if segment not in received]:
                self._compute(piece, lost, why)
            wanted, at = [segment for segment in wanted if segment in received], end

    def _layers_a_read(self, rest: StreamPiece, level: str, at: int) -> int:
        """Return how many layers to read at once, from layer `at` on."""
        nbytes, throughput = rest.sizes[level], self._throughput
        whole_s = None if throughput is None else self._link.sharing * nbytes / max(throughput, MIN_THROUGHPUT)
        return layers_together(self._n_layers, self._n_layers - at, whole_s)

    def _start(self, reading: PendingRead) -> PendingRead:
        try:
            threading.Thread(target=self._run, args=(reading,), name="ragfuse-stream", daemon=True).start()
        except RuntimeError:  # no thread can be started: read on this one
            self._run(reading)
        return reading

    def _decode_later(self, received: Mapping[int, EncodedLayers], level: str) -> None:
        """Queue layers for decoding, replacing what was there at another level."""
        for segment, encoded in received.items():
            decoding = self._decoding.setdefault(segment, {})
            for at in encoded.layers:
                if at in decoding:
                    decoding[at].cancel()
                decoding[at] = self._decoders.submit(self._decode, encoded, at)
            self._levels.setdefault(segment, {}).update(dict.fromkeys(encoded.layers, level))
            self._nbytes[segment] = self._nbytes.get(segment, 0) + encoded.nbytes

    def _refine(self) -> None:
        """While time is left, read the lossiest layers again, piece by piece, at the best level for which all fit."""
        while worst_loss := self._worst_loss():
            throughput, time_left_s = self._throughput, self._time_left_s()
            remaining, steps = list[StreamPiece](), list[tuple[tuple[int, ...], tuple[int, int]]]()
            for piece in self._pieces:
                layers = {at for level, _, at in self._worse(piece) if loss(level) == worst_loss}
                if layers:
                    segments = tuple(segment for segment in piece.segments if segment in self._decoding)
                    remaining.append(piece.rest(segments, len(layers) / self._n_layers))
                    steps.append((segments, _first_of(layers)))
            if throughput is None:
                return
            better = [level for level in remaining[0].sizes if loss(level) < worst_loss]
            level = better_level(remaining, better, throughput, time_left_s, self._link.sharing)
            if not level:
                return
            segments, (first, end) = steps[0]
            span = first, first + min(end - first, self._layers_a_read(remaining[0], level, first))
            if not self._read_again(PendingRead(segments, span, level, self._clock())):
                return

    def _read_again(self, reading: PendingRead) -> bool:
        """Read layers again at a better level, wait until the deadline at most, and return whether all came."""
        self._start(reading)
        is_done = reading.done.wait(max(0.0, self._time_left_s()))
        reading.stop.set()
        received = dict(reading.received)
        self._decode_later(received, reading.level)
        self._note(reading, received, self._clock(), BYTES_UNREADABLE if is_done else NOT_WAITED_FOR)
        return len(received) == len(reading.segments)

    def _wait(self, reading: PendingRead, remaining: Sequence[StreamPiece]) -> bool:
        """Wait for a read; return False if it is too slow and given up."""
        first, end = reading.span
        step = remaining[0].rest(reading.segments, (end - first) / (self._n_layers - first))
        nbytes, later_share = step.sizes[reading.level], (self._n_layers - end) / (self._n_layers - first)
        wait_s = first_look_s(step, reading.level, self._throughput, self._link.sharing)
        while not reading.done.wait(wait_s):
            waited_s = self._clock() - reading.requested
            if is_given_up(remaining, later_share, nbytes, waited_s, self._time_left_s()):
                reading.stop.set()
                if reading.began is not None:
                    self._link.record(nbytes, 2 * (self._clock() - reading.began))
                return False
            wait_s = waited_s * (BACKOFF - 1)
        return True

    def _run(self, reading: PendingRead) -> None:
        """Read segment after segment, on a thread of its own; a missing segment does not stop those after it."""
        first, end = reading.span
        try:
            with self._link.slot():
                reading.began = self._clock()
                for segment in reading.segments:
                    fetch = self._fetches[segment]
                    found = self._store.read_encoded(fetch.key, first, end - first, fetch.tier, reading.level)
                    if reading.stop.is_set():
                        break
                    if found is not None:
                        reading.received[segment] = found
        except Exception as error:
            log.warning(
                "Stored KV could not be read at level %s, so its text is computed: %s",
                reading.level,
                error,
            )
        finally:
            reading.ended = self._clock()
            reading.done.set()

    def _note(self, reading: PendingRead, received: Mapping[int, EncodedLayers], ended: float, why: str) -> None:
        """Record a read: its throughput for the decisions that follow, and its pieces for the trace.

        The throughput is counted from when the link was free for the read; the trace's seconds include the wait for
        it. A read without a byte is not counted for the throughput. `why` is the reason for segments that were not
        received.
        """
        nbytes, sharing, throughput = sum(encoded.nbytes for encoded in received.values()), self._link.sharing, None
        if nbytes and reading.began is not None:
            throughput = self._link.record(nbytes, min(ended, reading.ended or ended) - reading.began)
        present = [segment for segment in reading.segments if segment in received]
        missing = [segment for segment in reading.segments if segment not in received]
        for segments, piece_throughput, size, reason in ((present, throughput, nbytes, ""), (missing, None, 0, why)):
            if segments:
                tokens = sum(self._tokens[segment] for segment in segments)
                what = (self._with_others(segments), tokens, reading.level, reading.span, size)
                when = (reading.requested - self.terms.began_s, ended - reading.requested)
                self.pieces.append(PieceTrace(*what, *when, piece_throughput, sharing, reason))

    # decoding

    def _decode(self, encoded: EncodedLayers, at: int) -> LayerKV:
        kv = encoded.layer(at)
        if kv.keys.device == self._device:
            return kv
        return LayerKV(kv.keys.to(self._device), kv.values.to(self._device))

    def _decoded(self, segment: int, layer: Future[LayerKV]) -> LayerKV | None:
        try:
            return layer.result()
        except Exception as error:
            log.warning(
                "Stored KV of segment %d cannot be decoded, so its text is computed instead: %s", segment, error
            )
            return None


def _first_of(layers: Collection[int]) -> tuple[int, int]:
    """Return the first run of consecutive layers: its first layer, and the one after its last."""
    first = end = min(layers)
    while end in layers:
        end += 1
    return first, end
