"""Stage 3, fetch: layers of cached KV on their way to the model, from before it is free until its last layer is fused.

What lies behind a line and has a deadline is streamed (`kv_streamer.py`, CacheGen 5.3). While the model is another
prompt's, the next one is planned and its first layers are read (AttentionStore 3.2.1). Then the model is this prompt's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from ragfuse.engine.kv_streamer import KVStreamer, StreamedPlan
from ragfuse.engine.overflow import drops, room_of
from ragfuse.engine.planner import RevisablePlan
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.request import Request
from ragfuse.engine.trace_builder import Timing
from ragfuse.errors import InputError
from ragfuse.fuse.fusor import LayerSource
from ragfuse.hf.lock import FairLock
from ragfuse.load.layers import LayerReader
from ragfuse.plan.look_ahead import layers_before
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.telemetry.otel import loading
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import LoadPlan


@dataclass
class ReadAhead:
    """What was planned and read of a prompt before the model was its own.

    place: held until the model is; one prompt of an engine has it at a time.
    """

    place: ExitStack = field(default_factory=ExitStack)
    plan: LoadPlan | None = None
    _reading: ExitStack = field(default_factory=ExitStack)
    _reader: LayerReader | None = None

    def begin(self, plan: LoadPlan, reader: LayerReader) -> None:
        """Read what it takes, as far as the reader has room for it."""
        self.plan, self._reader = plan, self._reading.enter_context(loading(reader, plan))

    def reader(self, chosen: LoadPlan) -> AbstractContextManager[LayerReader] | None:
        """What reads for this plan, once; None where nothing was read ahead, or something else than it takes."""
        mine, self._reader = self._reader, None
        if mine is None or self.plan is None or _reads(self.plan) != _reads(chosen):
            self._reading.close()
            return None
        return _handed(mine, self._reading.pop_all())

    def close(self) -> None:
        """Let go of what nobody took."""
        with self.place, self._reading:
            pass


@contextmanager
def _handed(reader: LayerReader, held: ExitStack) -> Iterator[LayerReader]:
    with held:
        yield reader


def _reads(plan: LoadPlan) -> tuple[object, ...]:
    """What is read for a plan, and how."""
    return plan.fetches, plan.layers_a_read


@dataclass
class FetchedKV:
    """A prompt's layers, as its plan has them at the moment; a lost entry gives another plan and other layers.

    began_s: `time.perf_counter()` when the model was the prompt's own.
    """

    plan: RevisablePlan
    streamed: StreamedPlan | None
    ahead: ReadAhead
    fetcher: FetchStage
    began_s: float

    @property
    def since_s(self) -> float:
        """`time.perf_counter()` when the question's deadline began to run."""
        return self.streamed.began_s if self.streamed is not None else self.began_s

    def chosen(self) -> LoadPlan:
        """Return the plan as things are now."""
        streamed, lost = self.streamed, self.plan.lost
        if streamed is not None and (streamed.stream is not None or not lost):
            return streamed.plan
        counts = self.ahead.plan is None or bool(lost)
        return self.fetcher.noted(self.plan.make(time.perf_counter() - self.since_s, counts))

    @contextmanager
    def layers(self, chosen: LoadPlan) -> Iterator[tuple[LayerReader, LayerSource]]:
        """Open what reads the layers of a plan, and those layers with all that was streamed."""
        came = self.streamed_segments
        near = replace(chosen, fetches=tuple(fetch for fetch in chosen.fetches if fetch.segment not in came))
        with self.ahead.reader(near) or loading(self.fetcher.reader(near, self.plan.request), near) as reader:
            yield reader, self.streamed.over(reader) if self.streamed is not None else reader

    @property
    def streamed_segments(self) -> frozenset[int]:
        """Segments that came over a line and are to be used."""
        return self.streamed.streamed if self.streamed is not None else frozenset()

    def lose(self, segment: int, chosen: LoadPlan) -> None:
        """Go on without a segment that cannot be read any more."""
        self.plan.lose(segment, chosen.prompt)
        if self.streamed is not None:
            self.streamed.lose(segment)

    def timing(self, reader: LayerReader) -> Timing:
        """Return how long reading and computing took, now that both are done."""
        load_s, wait_s, due_s = reader.load_s, reader.wait_s, None
        compute_s = time.perf_counter() - self.began_s - wait_s
        if self.streamed is not None:
            due_s = self.streamed.due_s
        if self.streamed is not None and self.streamed.stream is not None:
            stream = self.streamed.stream
            load_s, wait_s = load_s + stream.load_s, wait_s + stream.wait_s
            compute_s -= stream.wait_s - stream.load_s
        return Timing(self.since_s, load_s, wait_s, compute_s, due_s)


@dataclass(frozen=True)
class FetchStage:
    """Brings the KV of an engine's prompts.

    prefetcher: leaves alone what a prompt reads for itself.
    """

    settings: Settings
    store: KVStore
    streamer: KVStreamer
    prefetcher: Prefetcher
    prefixes: PrefixCache
    _place: FairLock = field(default_factory=FairLock)

    @contextmanager
    def fetch(self, plan: RevisablePlan) -> Iterator[FetchedKV]:
        """Hold the model for a prompt, with its layers on their way.

        Raises:
            InputError: The answer is not wanted any more, or the prompt is longer than the model takes.
        """
        request, prompt = plan.request, plan.prompt
        lock = request.model.lock
        with self.begun(plan) as fetched, ExitStack() as held:
            if request.ask.reuse and not lock.is_mine:
                self.prefixes.settle(prompt)
            if lock.is_anothers and request.ask.deadline_s is None and fetched.streamed is None:
                fetched.ahead.place.enter_context(self._place)
                if lock.is_anothers:
                    self._read_ahead(fetched.ahead, plan)
            held.enter_context(lock)
            fetched.ahead.place.close()
            if any(end.is_set() for end in request.ends):
                raise InputError("The stream was closed before its answer began.")
            fetched.began_s = time.perf_counter()
            yield fetched

    @contextmanager
    def begun(self, plan: RevisablePlan) -> Iterator[FetchedKV]:
        """Stream what has a deadline, and hold nothing: for a prompt that is prefilled without an answer."""
        ahead, streamed = ReadAhead(), self.streamer.stream(plan)
        if streamed is not None:
            plan.prompt = streamed.plan.prompt
        with ExitStack() as held:
            held.callback(ahead.close)
            if streamed is not None:
                held.enter_context(streamed)
            yield FetchedKV(plan, streamed, ahead, self, time.perf_counter())

    def noted(self, chosen: LoadPlan) -> LoadPlan:
        """Return a plan whose keys the prefetcher leaves alone from now on."""
        self.prefetcher.leave(fetch.key for fetch in chosen.fetches)
        return chosen

    def reader(self, plan: LoadPlan, request: Request) -> LayerReader:
        """Return what reads the layers of a plan, not begun yet."""
        model = request.model
        before = layers_before(plan, model.n_layers)
        return LayerReader(self.store, plan.fetches, model.n_layers, plan.layers_a_read, model.device, before)

    def _read_ahead(self, ahead: ReadAhead, plan: RevisablePlan) -> None:
        """Plan and begin to read, as many layers as a read buffer holds, while the model is another prompt's."""
        request = plan.request
        room_of(plan.prompt, request.model, drops(request.ask, self.settings))
        chosen = self.noted(plan.make())
        ahead.begin(chosen, self.reader(chosen, request))


@dataclass(frozen=True)
class SlicedSource:
    """Layers of a source, of some segments the rows lo:hi alone."""

    source: LayerSource
    rows: Mapping[int, tuple[int, int]]

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """The layer's KV by segment."""
        found = self.source.read(layer)
        return {at: _part(kv, *self.rows[at]) if at in self.rows else kv for at, kv in found.items()}


def _part(kv: LayerKV | None, lo: int, hi: int) -> LayerKV | None:
    return LayerKV(kv.keys[:, lo:hi], kv.values[:, lo:hi]) if kv is not None else None
