"""Stage 3, fetch: load the cached KV of a plan, layer by layer, and acquire the model.

KV in remote tiers is streamed before the model is acquired, if the question has a deadline (`kv_streamer.py`, CacheGen
5.3). While another prompt uses the model, the first layers of the next one are read (AttentionStore 3.2.1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from ragfuse.engine.kv_streamer import KVStreamer, StreamedPlan
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.request import Request
from ragfuse.engine.trace_builder import Timing
from ragfuse.hf.lock import FairLock
from ragfuse.load.layers import LayerReader
from ragfuse.plan.look_ahead import layers_before
from ragfuse.store import KVStore
from ragfuse.telemetry.otel import loading
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import LoadPlan


@dataclass
class FetchedKV:
    """The KV of a prompt by its plan, layer by layer, while the prompt has the model. Thread-safe as its reader is.

    Args:
        plan: The plan.
        reader: Reads the layers of the segments that were not streamed.
        streamed: KV that was streamed under a deadline; None: nothing was.
        began_s: `time.perf_counter()` when the prompt acquired the model.
    """

    plan: LoadPlan
    reader: LayerReader
    streamed: StreamedPlan | None
    began_s: float

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Return the KV of a layer by segment, its rows alone; None for a segment that cannot be read."""
        found = dict(self.reader.read(layer))
        if self.streamed is not None:
            found |= self.streamed.read(layer)
        return {at: _part(kv, self.plan.prompt.segments[at].rows) for at, kv in found.items()}

    def ready(self) -> int:
        """Return how many of the next layers need no waiting; 0 where some are still decoded from a stream."""
        return self.reader.ready() if self.streamed is None or self.streamed.stream is None else 0

    def timing(self) -> Timing:
        """Return how long reading and computing took; call it once both are done."""
        began_s, due_s, load_s, wait_s = self.began_s, None, self.reader.load_s, self.reader.wait_s
        compute_s = time.perf_counter() - began_s - wait_s
        if self.streamed is not None:
            began_s, due_s = self.streamed.began_s, self.streamed.due_s
        if self.streamed is not None and self.streamed.stream is not None:
            stream = self.streamed.stream
            load_s, wait_s = load_s + stream.load_s, wait_s + stream.wait_s
            compute_s -= stream.wait_s - stream.load_s
        return Timing(began_s, load_s, wait_s, compute_s, due_s)


@dataclass(frozen=True)
class FetchStage:
    """Loads the KV of an engine's prompts.

    Args:
        store: The store.
        streamer: Streams KV from remote tiers under a deadline.
        prefetcher: Skips keys that a prompt reads itself.
    """

    store: KVStore
    streamer: KVStreamer
    prefetcher: Prefetcher
    _next: FairLock = field(default_factory=FairLock)  # of the one prompt that gets the model next, and reads ahead

    @contextmanager
    def fetch(self, plan: LoadPlan, request: Request) -> Iterator[FetchedKV]:
        """Acquire the model for a prompt and hold it, while the prompt's layers are loaded.

        Raises:
            InputError: The request was cancelled.
        """
        model, streamed, rest = request.model, self.streamer.stream(plan, request), plan
        with ExitStack() as held:
            if streamed is not None:
                held.enter_context(streamed)
                plan, came = streamed.plan, streamed.streamed
                rest = replace(plan, fetches=tuple(fetch for fetch in plan.fetches if fetch.segment not in came))
            self.prefetcher.skip(fetch.key for fetch in plan.fetches)
            before = layers_before(rest, model.n_layers)
            reader = LayerReader(self.store, rest.fetches, model.n_layers, rest.layers_a_read, model.device, before)
            with nullcontext() if model.lock.is_mine else self._next:
                held.enter_context(loading(reader, rest))
                held.enter_context(model.lock)
            request.check_open()
            yield FetchedKV(plan, reader, streamed, time.perf_counter())


def _part(kv: LayerKV | None, rows: tuple[int, int] | None) -> LayerKV | None:
    if kv is None or rows is None:
        return kv
    lo, hi = rows
    return LayerKV(kv.keys[:, lo:hi], kv.values[:, lo:hi])
