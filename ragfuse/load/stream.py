"""Brings KV over a line in pieces, each at the level that the deadline allows, or not at all (CacheGen 5.3).

One piece comes after the other, each read by a thread of its own; how fast it came decides how the next one comes.
What has come is decoded by further threads while the next is on its way. A piece that takes too long is given up, and
what cannot be read is tried at another level; what does not come becomes text: the fusor computes it. How a piece comes
is decided by `plan.adapt`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ragfuse.arrivals import PieceTrace
from ragfuse.core import Fetch, LayerKV
from ragfuse.load.link import Link
from ragfuse.load.staging import Layer
from ragfuse.plan.adapt import (
    AGAIN,
    PIECE_TOKENS,
    TEXT,
    Adapt,
    Part,
    Piece,
    decide,
    first_look_s,
    is_given_up,
    pieces,
)
from ragfuse.store import Encoded, KVStore

log = logging.getLogger("ragfuse.load")

CPU = torch.device("cpu")
DECODERS = max(1, min(4, os.cpu_count() or 1))
"""Threads that decode what has come."""

IN_TIME = "computed, as that is in time"
SOONER = "computed, as its bytes would come later"
LATE = "given up, as its bytes came too slowly"
UNREADABLE = "its bytes could not be read"


@dataclass(frozen=True)
class Terms:
    """What a stream is to keep. began_s: `clock()` when the deadline began to run; deadline_s: seconds from then.

    base_s: seconds that the prompt computes in any case, behind the last piece. prior: bytes a second that the line is
    taken to carry before anything was read over it, None: not known.
    """

    began_s: float
    deadline_s: float
    base_s: float = 0.0
    adapt: Adapt = "paper"
    piece_tokens: int = PIECE_TOKENS
    prior: float | None = None
    level: str | None = None
    """All pieces at this level, whatever the deadline; None: as it allows."""


@dataclass
class _Reading:
    """One piece on its way: what has come of it so far, by segment. `stop` lets it end with the segment at hand."""

    piece: Piece
    level: str
    came: dict[int, Encoded] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


class Stream:
    """Fetches that come over one link, in the order of `parts`. A context manager: `run` in it, then `read` layers.

    pieces: what happened, piece by piece. text: segments that did not come and are to be computed, and why. came:
    level and bytes by segment. load_s: seconds until the last piece was there; wait_s: these and those that `read`
    waited for decoding.
    """

    def __init__(
        self,
        store: KVStore,
        fetches: Sequence[Fetch],
        parts: Sequence[Part],
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
        self._left, self._link, self._terms = pieces(parts, terms.piece_tokens), link, terms
        self._device, self._clock = device, clock
        self._promised_s = terms.base_s
        self._decoders = ThreadPoolExecutor(DECODERS, "ragfuse-decode")
        self._decoding: dict[int, list[Future[LayerKV]]] = {}

    def close(self) -> None:
        """Decode nothing more. A piece that was given up ends by itself, as its tier lets go of it."""
        self._decoders.shutdown(cancel_futures=True)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> None:
        """Bring every piece, or decide that it is computed."""
        began = self._clock()
        with self._link.joined():
            while self._left:
                choice = self._choice()
                if choice == TEXT:
                    self._compute(self._left[0], IN_TIME if self._is_in_time() else SOONER)
                    self._left = self._left[1:]
                else:
                    self._bring(choice)
        self.last_s = self._clock()
        self.load_s = self.wait_s = self.last_s - began

    def read(self, layer: int) -> Layer:
        """The layer's KV of every segment that has come, None for one that cannot be decoded."""
        began = self._clock()
        found = {segment: self._decoded(segment, layers[layer]) for segment, layers in self._decoding.items()}
        self.wait_s += self._clock() - began
        return found

    # deciding

    def _choice(self) -> str:
        if self._terms.level is not None:
            return self._terms.level if self._terms.level in self._left[0].sizes else TEXT
        return decide(self._left, self._throughput, self._left_s(), self._link.sharing, self._terms.adapt)

    def _left_s(self) -> float:
        """Until the deadline, without what is to be computed by now."""
        return self._terms.began_s + self._terms.deadline_s - self._clock() - self._promised_s

    def _is_in_time(self) -> bool:
        text_s = self._left[0].text_s
        return text_s is not None and text_s <= self._left_s()

    @property
    def _throughput(self) -> float | None:
        seen = self._link.throughput
        return self._terms.prior if seen is None else seen

    def _compute(self, piece: Piece, why: str) -> None:
        self._promised_s += piece.text_s or 0.0
        self.text |= dict.fromkeys(piece.segments, why)
        self.pieces.append(
            PieceTrace(piece.segments, piece.tokens, TEXT, began_s=self._clock() - self._terms.began_s, why=why)
        )

    # bringing

    def _bring(self, level: str) -> None:
        """The next piece at this level; what did not come of it is next again, or computed."""
        piece, began = self._left[0], self._clock()
        reading = _Reading(piece, level)
        thread = threading.Thread(target=self._run, args=(reading,), name="ragfuse-stream", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: read here
            self._run(reading)
        gave_up = not self._waited(reading, began)
        came, seconds = dict(reading.came), self._clock() - began
        for segment, encoded in came.items():
            self.came[segment] = (level, encoded.nbytes)
            self._decoding[segment] = [self._decoders.submit(self._decode, encoded, at) for at in range(len(encoded))]
        rest = piece.without(frozenset(came), level)
        nbytes = sum(encoded.nbytes for encoded in came.values())
        self._note(reading, nbytes, seconds, LATE if gave_up else UNREADABLE if rest is not None else "")
        self._left = self._left[1:]
        if rest is not None and gave_up:
            self._compute(rest, LATE)
        elif rest is not None:
            self._left = [rest, *self._left]
            if not rest.sizes:
                self._compute(self._left.pop(0), UNREADABLE)

    def _waited(self, reading: _Reading, began: float) -> bool:
        """Whether the piece was read to its end; False: it was given up."""
        wait_s = first_look_s(reading.piece, reading.level, self._throughput, self._link.sharing)
        if self._terms.level is not None:
            wait_s = None
        while not reading.done.wait(wait_s):
            waited_s = self._clock() - began
            if is_given_up(self._left, reading.level, waited_s, self._left_s(), self._terms.adapt):
                reading.stop.set()
                return False
            wait_s = waited_s * (AGAIN - 1)
        return True

    def _run(self, reading: _Reading) -> None:
        """On a thread of its own: read segment after segment, up to the first that cannot be."""
        try:
            with self._link.turn():
                for segment in reading.piece.segments:
                    fetch = self._fetches[segment]
                    found = self._store.read_encoded(fetch.key, self._n_layers, fetch.tier, reading.level)
                    if found is None or reading.stop.is_set():
                        break
                    reading.came[segment] = found
        except Exception as error:
            log.warning("A piece at level %s could not be read: %s", reading.level, error)
        finally:
            reading.done.set()

    def _note(self, reading: _Reading, nbytes: int, seconds: float, why: str) -> None:
        """How fast it came: for the next piece, and for the trace. What broke at once says nothing of the line."""
        piece, sharing = reading.piece, self._link.sharing
        throughput = self._link.saw(nbytes, seconds) if nbytes or why == LATE else None
        began_s = self._clock() - seconds - self._terms.began_s
        self.pieces.append(
            PieceTrace(piece.segments, piece.tokens, reading.level, nbytes, began_s, seconds, throughput, sharing, why)
        )

    # decoding

    def _decode(self, encoded: Encoded, at: int) -> LayerKV:
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
