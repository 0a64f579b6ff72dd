"""Stage 3, fetch: load the cached KV of a plan, layer by layer, and acquire the model.

KV in remote tiers is streamed before the model is acquired, if the question has a deadline (`kv_streamer.py`, CacheGen
5.3). While another prompt uses the model, the next one is planned and its first layers are read (AttentionStore 3.2.1).
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
    """The plan and the layers of a prompt that were made ready before it acquired the model.

    Args:
        lock: Holds the engine's read-ahead lock, which one prompt at a time has, until the model is acquired.
        plan: The plan for which layers were read ahead.
    """

    lock: ExitStack = field(default_factory=ExitStack)
    plan: LoadPlan | None = None
    _reading: ExitStack = field(default_factory=ExitStack)
    _reader: LayerReader | None = None

    def begin(self, plan: LoadPlan, reader: LayerReader) -> None:
        """Start reading the layers of a plan, as many as the reader buffers."""
        self.plan, self._reader = plan, self._reading.enter_context(loading(reader, plan))

    def reader(self, chosen: LoadPlan) -> AbstractContextManager[LayerReader] | None:
        """Return the reader that was started, once; None where none was, or its layers are not those of this plan."""
        reader, self._reader = self._reader, None
        if reader is None or self.plan is None or _reads(self.plan) != _reads(chosen):
            self._reading.close()
            return None
        return _handed(reader, self._reading.pop_all())

    def close(self) -> None:
        """Release the lock, and close the reader if `reader` has not handed it out."""
        with self.lock, self._reading:
            pass


@contextmanager
def _handed(reader: LayerReader, held: ExitStack) -> Iterator[LayerReader]:
    with held:
        yield reader


def _reads(plan: LoadPlan) -> tuple[object, ...]:
    """Return what determines the reads of a plan."""
    return plan.fetches, plan.layers_a_read


@dataclass
class FetchedKV:
    """The KV of a prompt by its current plan. An unreadable entry leads to another plan and other layers.

    Args:
        plan: The plan, which can be made again.
        streamed: KV that was streamed under a deadline; None: nothing was.
        ahead: Layers that were read ahead.
        fetcher: The stage that made this.
        began_s: `time.perf_counter()` when the prompt acquired the model.
    """

    plan: RevisablePlan
    streamed: StreamedPlan | None
    ahead: ReadAhead
    fetcher: FetchStage
    began_s: float

    @property
    def since_s(self) -> float:
        """`time.perf_counter()` at the start of the question's deadline."""
        return self.streamed.began_s if self.streamed is not None else self.began_s

    def chosen(self) -> LoadPlan:
        """Return the plan for the current state of the store."""
        streamed, lost = self.streamed, self.plan.lost
        if streamed is not None and (streamed.stream is not None or not lost):
            return streamed.plan
        return self.fetcher.noted(self.plan.make(time.perf_counter() - self.since_s))

    @contextmanager
    def layers(self, chosen: LoadPlan) -> Iterator[tuple[LayerReader, LayerSource]]:
        """Open the reader of a plan, and the source of all its layers, streamed ones included."""
        streamed = self.streamed_segments
        rest = replace(chosen, fetches=tuple(fetch for fetch in chosen.fetches if fetch.segment not in streamed))
        with self.ahead.reader(rest) or loading(self.fetcher.reader(rest, self.plan.request), rest) as reader:
            yield reader, self.streamed.over(reader) if self.streamed is not None else reader

    @property
    def streamed_segments(self) -> frozenset[int]:
        """Segments that were streamed and are usable."""
        return self.streamed.streamed if self.streamed is not None else frozenset()

    def lose(self, segment: int, chosen: LoadPlan) -> None:
        """Leave a segment that cannot be read out of later plans."""
        self.plan.lose(segment, chosen.prompt)
        if self.streamed is not None:
            self.streamed.lose(segment)

    def timing(self, reader: LayerReader) -> Timing:
        """Return how long reading and computing took; call it once both are done."""
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
    """Loads the KV of an engine's prompts.

    Args:
        settings: The settings.
        store: The store.
        streamer: Streams KV from remote tiers under a deadline.
        prefetcher: Skips keys that a prompt reads itself.
        prefixes: The prefix cache.
    """

    settings: Settings
    store: KVStore
    streamer: KVStreamer
    prefetcher: Prefetcher
    prefixes: PrefixCache
    _read_ahead_lock: FairLock = field(default_factory=FairLock)

    @contextmanager
    def fetch(self, plan: RevisablePlan) -> Iterator[FetchedKV]:
        """Acquire the model for a prompt and hold it, while the prompt's layers are loaded.

        Raises:
            InputError: The request was cancelled, or the prompt does not fit the model's context.
        """
        request, prompt = plan.request, plan.prompt
        lock = request.model.lock
        with self.begun(plan) as fetched, ExitStack() as held:
            if request.ask.reuse and not lock.is_mine:
                self.prefixes.settle(prompt)
            if lock.is_anothers and request.ask.deadline_s is None and fetched.streamed is None:
                fetched.ahead.lock.enter_context(self._read_ahead_lock)
                if lock.is_anothers:
                    self._read_ahead(fetched.ahead, plan)
            held.enter_context(lock)
            fetched.ahead.lock.close()
            request.check_open()
            fetched.began_s = time.perf_counter()
            yield fetched

    @contextmanager
    def begun(self, plan: RevisablePlan) -> Iterator[FetchedKV]:
        """Stream KV if the question has a deadline, without acquiring the model; for prefills without an answer."""
        ahead, streamed = ReadAhead(), self.streamer.stream(plan)
        if streamed is not None:
            plan.prompt = streamed.plan.prompt
        with ExitStack() as held:
            held.callback(ahead.close)
            if streamed is not None:
                held.enter_context(streamed)
            yield FetchedKV(plan, streamed, ahead, self, time.perf_counter())

    def noted(self, chosen: LoadPlan) -> LoadPlan:
        """Have the prefetcher skip the keys of a plan, and return the plan."""
        self.prefetcher.skip(fetch.key for fetch in chosen.fetches)
        return chosen

    def reader(self, plan: LoadPlan, request: Request) -> LayerReader:
        """Return the reader of a plan's layers, not started yet."""
        model = request.model
        before = layers_before(plan, model.n_layers)
        return LayerReader(self.store, plan.fetches, model.n_layers, plan.layers_a_read, model.device, before)

    def _read_ahead(self, ahead: ReadAhead, plan: RevisablePlan) -> None:
        """Plan and start reading, as many layers as a read buffer holds, while another prompt uses the model."""
        request = plan.request
        room_of(plan.prompt, request.model, drops(request.ask, self.settings))
        chosen = self.noted(plan.make())
        ahead.begin(chosen, self.reader(chosen, request))


@dataclass(frozen=True)
class SlicedSource:
    """A source of layers that cuts the KV of some segments to rows lo:hi."""

    source: LayerSource
    rows: Mapping[int, tuple[int, int]]

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Return the KV of a layer by segment."""
        found = self.source.read(layer)
        return {at: _part(kv, *self.rows[at]) if at in self.rows else kv for at, kv in found.items()}

    def ready(self) -> int:
        """Return how many of the next layers need no waiting."""
        return self.source.ready()


def _part(kv: LayerKV | None, lo: int, hi: int) -> LayerKV | None:
    return LayerKV(kv.keys[:, lo:hi], kv.values[:, lo:hi]) if kv is not None else None
