"""Brings KV over a line in pieces, each at the level that the deadline allows, or not at all (CacheGen 5.3).

One piece comes after the other, some layers at a time, each read by a thread of its own; how fast these came decides
how the next ones come. Once something of all is there, what lost most may come again at a better level (`refine`). What
has come is decoded by further threads while the next is on its way. A piece that takes too long is given up, and what
cannot be read is tried at another level; what does not come becomes text: the fusor computes it. With `refine` such a
piece is set aside first and stays on its way while the others come: what is computed is decided when nothing else is
left to bring. How a piece comes is decided by `plan.adapt`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch

from ragfuse.load.layers import CPU
from ragfuse.load.link import Link
from ragfuse.load.piece import CurrentPiece, PendingRead
from ragfuse.load.staging_buffer import Layer
from ragfuse.load.terms import (
    BYTES_UNREADABLE,
    COMPUTED_IN_TIME,
    COMPUTED_SOONER,
    DEADLINE_MARGIN,
    GIVEN_UP,
    LEVEL_NOT_KEPT,
    NOT_WAITED_FOR,
    SET_ASIDE,
    Terms,
)
from ragfuse.plan.adapt import (
    AGAIN,
    AS_TEXT,
    LONGER,
    MIN_THROUGHPUT,
    StreamPart,
    StreamPiece,
    decide,
    decide_better,
    decide_first,
    first_look_s,
    is_given_up,
    is_late,
    layers_together,
    pieces,
    spare_s,
)
from ragfuse.store import EncodedLayers, KVStore
from ragfuse.store.levels import loss_of
from ragfuse.types.answer import PieceTrace
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import Fetch

log = logging.getLogger("ragfuse.load")

DECODERS = max(1, min(4, os.cpu_count() or 1))
"""Threads that decode what has come."""


class Stream:
    """Fetches that come over one link, in the order of `parts`. A context manager: `run` in it, then `read` layers.

    pieces: what happened, step by step. text: segments that did not come and are to be computed, and why. came: by
    segment, the level that lost most of it, and bytes. load_s: seconds until the last piece was there; wait_s: these
    and those that `read` waited for decoding.
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
        self.came: dict[int, tuple[str, int]] = {}
        self.load_s = self.wait_s = self.last_s = 0.0
        self._store, self._fetches = store, {fetch.segment: fetch for fetch in fetches}
        self._n_layers = n_layers
        self._pieces, self._link, self._terms = pieces(parts, terms.piece_tokens), link, terms
        self._behind: list[StreamPiece] = []
        self._aside: list[CurrentPiece] = []
        self._also = {part.segment: part.also for part in parts}
        self._tokens = {part.segment: part.tokens for part in parts}
        self._device, self._clock = device, clock
        self._promised_s = terms.base_s
        self._decoders = ThreadPoolExecutor(DECODERS, "ragfuse-decode")
        self._decoding: dict[int, dict[int, Future[LayerKV]]] = {}
        self._levels: dict[int, dict[int, str]] = {}
        self._stood = False
        self._nbytes: dict[int, int] = {}

    def close(self) -> None:
        """Decode nothing more, hold nothing. A piece that was given up ends by itself, as its tier lets go of it."""
        self._decoders.shutdown(cancel_futures=True)
        self._decoding = {}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Bring every piece, or decide that it is computed."""
        began = self._clock()
        with self._link.joined():
            for number, piece in enumerate(self._pieces):
                self._behind = [*self._pieces[number + 1 :], *self._waiting()]
                self._bring(CurrentPiece(piece, list(piece.segments)), self._refines)
            while self._aside:
                now = self._aside.pop(0)
                self._behind = self._waiting()
                self._bring(now, False)
            if self._refines:
                self._refine()
        for segment in self._decoding:
            level = max(dict.fromkeys(self._levels[segment].values()), key=_loss)
            self.came[segment] = level, self._nbytes[segment]
            self.came |= dict.fromkeys(self._also[segment], (level, 0))
        self.last_s = self._clock()
        self.load_s = self.wait_s = self.last_s - began

    def read(self, layer: int) -> Layer:
        """The layer's KV of every segment that has come, None for one that cannot be decoded."""
        began = self._clock()
        found = {segment: self._decoded(segment, layers[layer]) for segment, layers in self._decoding.items()}
        found |= {other: kv for segment, kv in found.items() for other in self._also[segment]}
        self.wait_s += self._clock() - began
        return found

    # deciding

    def _left(self, now: CurrentPiece) -> list[StreamPiece]:
        """All that is still to come, first what is left of those that lack the layers at hand."""
        lacking, behind = ((self._n_layers - at) / self._n_layers for at in (now.at, now.end))
        others = [segment for segment in now.wanted if segment not in now.lacking]
        later = [now.piece.rest(others, behind)] if others and behind else []
        return [now.piece.rest(now.lacking, lacking, now.banned), *later, *self._behind]

    def _choice(self, now: CurrentPiece, left: Sequence[StreamPiece]) -> str:
        if self._terms.level is not None:
            return self._terms.level if self._terms.level in left[0].sizes else AS_TEXT
        known = left, self._throughput, self._left_s(), self._link.sharing
        if self._refines:
            begun = now.at > 0
            return decide_first(*known, is_whole=not begun and not self._lost(), has_begun=begun and not now.stood)
        return decide(*known, self._terms.adapt)

    @property
    def _refines(self) -> bool:
        """Whether better levels may follow what came."""
        return self._terms.adapt == "refine" and self._terms.level is None

    def _waiting(self) -> list[StreamPiece]:
        """What is still to come of pieces that were set aside."""
        n = self._n_layers
        return [each.piece.rest(each.wanted, (n - each.at) / n) for each in self._aside]

    def _lost(self) -> int:
        """How much was lost most of what came, where its piece is kept with less: 0 for nothing."""
        return max(map(_loss, {level for piece in self._pieces for level, _, _ in self._worse(piece)}), default=0)

    def _worse(self, piece: StreamPiece) -> Iterator[tuple[str, int, int]]:
        """(level, segment, layer) of what came of a piece, and is kept with less loss."""
        best = next(iter(piece.sizes), "")
        for segment in piece.segments:
            if segment in self._decoding:
                yield from ((level, segment, at) for at, level in self._levels[segment].items() if level != best)

    def _left_s(self) -> float:
        """Until the deadline, without what is to be computed by now."""
        return self._terms.began_s + (1 - DEADLINE_MARGIN) * self._terms.deadline_s - self._clock() - self._promised_s

    @property
    def _throughput(self) -> float | None:
        seen = self._link.throughput
        return self._terms.prior if seen is None else seen

    def _compute(self, now: CurrentPiece, segments: Sequence[int], why: str) -> None:
        """These are computed, whatever came of them."""
        rest = now.piece.rest(segments, 1.0)
        self._promised_s += (rest.text_s or 0.0) * (LONGER if self._refines else 1.0)
        self.text |= dict.fromkeys(self._with_others(segments), why)
        for segment in segments:
            self._decoding.pop(segment, None)
        now.wanted = [segment for segment in now.wanted if segment not in segments]
        began_s = self._clock() - self._terms.began_s
        self.pieces.append(PieceTrace(self._with_others(segments), rest.tokens, AS_TEXT, began_s=began_s, why=why))

    def _with_others(self, segments: Sequence[int]) -> tuple[int, ...]:
        """These, and those that take their rows from the same entries."""
        return tuple(each for segment in segments for each in (segment, *self._also[segment]))

    # bringing

    def _bring(self, now: CurrentPiece, may_wait: bool) -> None:
        """Layer by layer, some at a time, until all are there or the piece is computed, or until it is set aside.

        may_wait: whether it may be set aside, which leaves it as it is then.
        """
        while now.wanted and now.at < self._n_layers:
            if now.reading is None:
                now.lacking, now.banned, now.end = list(now.wanted), set(), now.at
            while now.lacking:
                left = self._left(now)
                if now.reading is None:
                    level = self._choice(now, left)
                    if level == AS_TEXT:
                        self._as_text(now, left)
                        break
                    if now.end == now.at:
                        now.end += self._together(left[0], level, now.at)
                    now.reading = self._started(
                        PendingRead(tuple(now.lacking), (now.at, now.end), level, self._clock())
                    )
                if not self._read(now, now.reading, left, may_wait):
                    self._aside.append(now)
                    return
            now.at = now.end

    def _as_text(self, now: CurrentPiece, left: Sequence[StreamPiece]) -> None:
        """What lacks the layers at hand is computed: all of the piece, or what of it could not be read."""
        self._compute(now, now.lacking, self._why_text(now, left[0]))
        now.lacking = []

    def _why_text(self, now: CurrentPiece, piece: StreamPiece) -> str:
        wanted = self._terms.level
        if not piece.sizes or wanted in now.banned:
            return BYTES_UNREADABLE
        if wanted is not None:
            return LEVEL_NOT_KEPT
        in_time = piece.text_s is not None and piece.text_s <= self._left_s()
        return COMPUTED_IN_TIME if in_time else COMPUTED_SOONER

    def _together(self, rest: StreamPiece, level: str, at: int) -> int:
        """How many layers to read now, from this one on."""
        left, throughput = rest.sizes[level], self._throughput
        whole_s = None if throughput is None else self._link.sharing * left / max(throughput, MIN_THROUGHPUT)
        return layers_together(self._n_layers, self._n_layers - at, whole_s)

    def _read(self, now: CurrentPiece, reading: PendingRead, left: Sequence[StreamPiece], may_wait: bool) -> bool:
        """These layers of all that lack them; what did not come is lacking still, or computed. False: set aside."""
        was_aside, began = now.is_aside, self._clock() if now.is_aside else reading.asked
        gave_up = not self._waited(reading, left, began, may_wait)
        came, ended = dict(reading.came), self._clock()
        self._stood = gave_up or (self._stood and not came)
        now.is_aside, now.stood = gave_up and may_wait, was_aside
        if now.is_aside:
            self._note(reading, {}, (began, ended), SET_ASIDE)
            return False
        now.reading = None
        self._take(came, reading.level)
        now.lacking = [segment for segment in now.lacking if segment not in came]
        self._note(reading, came, (began, ended), GIVEN_UP if gave_up else BYTES_UNREADABLE)
        if gave_up:
            self._compute(now, reading.segments, GIVEN_UP)
            now.lacking = []
        elif now.lacking:
            now.banned.add(reading.level)
        return True

    def _started(self, reading: PendingRead) -> PendingRead:
        try:
            threading.Thread(target=self._run, args=(reading,), name="ragfuse-stream", daemon=True).start()
        except RuntimeError:  # no thread to be had: read here
            self._run(reading)
        return reading

    def _take(self, came: Mapping[int, EncodedLayers], level: str) -> None:
        """Have it decoded, in place of what was there."""
        for segment, encoded in came.items():
            decoding = self._decoding.setdefault(segment, {})
            for at in encoded.layers:
                if at in decoding:
                    decoding[at].cancel()
                decoding[at] = self._decoders.submit(self._decode, encoded, at)
            self._levels.setdefault(segment, {}).update(dict.fromkeys(encoded.layers, level))
            self._nbytes[segment] = self._nbytes.get(segment, 0) + encoded.nbytes

    def _refine(self) -> None:
        """While time is left, what lost most comes again, piece by piece, with as little loss as all of it may have."""
        while lost := self._lost():
            throughput, left_s = self._throughput, self._left_s()
            left, steps = list[StreamPiece](), list[tuple[tuple[int, ...], tuple[int, int]]]()
            for piece in self._pieces:
                layers = {at for level, _, at in self._worse(piece) if _loss(level) == lost}
                if layers:
                    segments = tuple(segment for segment in piece.segments if segment in self._decoding)
                    left.append(piece.rest(segments, len(layers) / self._n_layers))
                    steps.append((segments, _first_of(layers)))
            if throughput is None:
                return
            better = [level for level in left[0].sizes if _loss(level) < lost]
            level = decide_better(left, better, throughput, left_s, self._link.sharing)
            if not level:
                return
            segments, (first, end) = steps[0]
            span = first, first + min(end - first, self._together(left[0], level, first))
            if not self._again(PendingRead(segments, span, level, self._clock())):
                return

    def _again(self, reading: PendingRead) -> bool:
        """Layers that are there at another level, waited for until the deadline; whether all of them came."""
        self._started(reading)
        is_done = reading.done.wait(max(0.0, self._left_s()))
        reading.stop.set()
        came = dict(reading.came)
        self._take(came, reading.level)
        self._note(reading, came, (reading.asked, self._clock()), BYTES_UNREADABLE if is_done else NOT_WAITED_FOR)
        return len(came) == len(reading.segments)

    def _waited(self, reading: PendingRead, left: Sequence[StreamPiece], began: float, may_wait: bool) -> bool:
        """Whether it was read to its end; False: it is set aside, or given up where it may not wait."""
        first, end = reading.span
        step = left[0].rest(reading.segments, (end - first) / (self._n_layers - first))
        nbytes, behind, wait_s = step.sizes[reading.level], (self._n_layers - end) / (self._n_layers - first), None
        if self._terms.level is None:
            stood = self._stood and self._refines
            wait_s = first_look_s(step, reading.level, self._throughput, self._link.sharing, stood)
            if wait_s is not None and self._refines and not may_wait:
                wait_s = max(wait_s, spare_s(left, self._left_s()))
        is_over = is_late if may_wait else is_given_up
        while not reading.done.wait(wait_s):
            waited_s = self._clock() - began
            if is_over(left, behind, nbytes, waited_s, self._left_s()):
                if not may_wait:
                    reading.stop.set()
                if reading.began is not None:
                    self._link.saw(nbytes, 2 * (self._clock() - reading.began))
                return False
            wait_s = waited_s * (AGAIN - 1)
        return True

    def _run(self, reading: PendingRead) -> None:
        """On a thread of its own: read segment after segment; one that is not there keeps none behind it."""
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
                        reading.came[segment] = found
        except Exception as error:
            log.warning("A piece at level %s could not be read: %s", reading.level, error)
        finally:
            reading.ended = self._clock()
            reading.done.set()

    def _note(
        self, reading: PendingRead, came: Mapping[int, EncodedLayers], span_s: tuple[float, float], why: str
    ) -> None:
        """How fast it came once it had its turn: for what is next, and for the trace, with the wait for the turn.

        why: what did not come did not; all of a step that was given up. What broke at once says nothing of the line.
        """
        began, ended = span_s
        nbytes, sharing, throughput = sum(encoded.nbytes for encoded in came.values()), self._link.sharing, None
        if nbytes and why != GIVEN_UP and reading.began is not None:
            throughput = self._link.saw(nbytes, min(ended, reading.ended or ended) - reading.began)
        there = [segment for segment in reading.segments if segment in came and why != GIVEN_UP]
        gone = [segment for segment in reading.segments if segment not in there]
        for segments, told, size, word in ((there, throughput, nbytes, ""), (gone, None, 0 if there else nbytes, why)):
            if segments:
                tokens = sum(self._tokens[segment] for segment in segments)
                what = (self._with_others(segments), tokens, reading.level, reading.span, size)
                when = (began - self._terms.began_s, ended - began)
                self.pieces.append(PieceTrace(*what, *when, told, sharing, word))

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
            log.warning("What came of segment %d cannot be decoded: %s", segment, error)
            return None


@lru_cache(64)
def _loss(level: str) -> int:
    return loss_of((level,))


def _first_of(layers: Collection[int]) -> tuple[int, int]:
    """The first of these layers, and the one behind those that follow it without a gap."""
    first = end = min(layers)
    while end in layers:
        end += 1
    return first, end
