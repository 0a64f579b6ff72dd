"""Stage 3, fetch: load the cached KV of a plan, layer by layer, and acquire the model.

If the question has a deadline, KV in remote tiers is streamed before the model is acquired
(CacheGen 5.3): `plan` and `load.stream` decide what comes and at which level, and the plan reads
only what came. While another prompt uses the model, the first layers of the next one are read
(AttentionStore 3.2.1).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.request import Request
from ragfuse.hf.lock import FairLock
from ragfuse.load.layers import LayerReader
from ragfuse.load.stream import BYTES_UNREADABLE, Stream, Terms
from ragfuse.plan.cost import Blend
from ragfuse.plan.look_ahead import layers_before
from ragfuse.plan.stream_level import parts_of
from ragfuse.telemetry.otel import loading
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import Fetch, LoadPlan

NOTHING_CAME = "nothing of it came in time over the line"


@dataclass
class FetchedKV:
    """The KV of a prompt by its plan, layer by layer, while the prompt has the model. Thread-safe
    as its reader is.

    Args:
        request: The request.
        plan: The plan.
        reader: Reads the layers of the segments that were not streamed.
        stream: KV that was streamed under a deadline; None: nothing was.
        began_s: `time.perf_counter()` when the prompt acquired the model.
    """

    request: Request
    plan: LoadPlan
    reader: LayerReader
    stream: Stream | None
    began_s: float

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Return the KV of a layer by segment, its rows alone; None for a segment that cannot be
        read.
        """
        found = dict(self.reader.read(layer))
        if self.stream is not None:
            found |= self.stream.read(layer)
        return {at: _part(kv, self.plan.prompt.segments[at].rows) for at, kv in found.items()}

    def ready(self) -> int:
        """Return how many of the next layers need no waiting; 0 where some are still decoded from a
        stream.
        """
        return self.reader.ready() if self.stream is None else 0


@dataclass(frozen=True)
class FetchStage:
    """Loads the KV of an engine's prompts.

    Args:
        prefetcher: Skips keys that a prompt reads itself.
    """

    prefetcher: Prefetcher
    # of the one prompt that gets the model next, and reads ahead
    _next: FairLock = field(default_factory=FairLock)

    @contextmanager
    def fetch(self, plan: LoadPlan, request: Request) -> Iterator[FetchedKV]:
        """Acquire the model for a prompt and hold it, while the prompt's layers are loaded.

        Raises:
            InputError: The request was cancelled.
        """
        model, store, stream, left_s = request.model, request.runtime.store, None, request.left_s
        with ExitStack() as held:
            remote = {tier.name for tier in store.tiers if tier.remote}
            if left_s is not None and request.ask.reuse:
                plan = _revived(plan, left_s, remote)
                if far := [fetch for fetch in plan.fetches if fetch.tier in remote]:
                    self.prefetcher.skip(fetch.key for fetch in plan.fetches)
                    stream = held.enter_context(self._stream(plan, far, left_s, request))
                    stream.run()
                    plan = _after(plan, stream)
            self.prefetcher.skip(fetch.key for fetch in plan.fetches)
            came = stream.received if stream is not None else ()
            rest = replace(
                plan, fetches=tuple(fetch for fetch in plan.fetches if fetch.segment not in came)
            )
            before = layers_before(rest, model.n_layers)
            reader = LayerReader(
                store, rest.fetches, model.n_layers, rest.layers_a_read, model.device, before
            )
            with nullcontext() if model.lock.is_mine else self._next:
                held.enter_context(loading(reader, rest))
                held.enter_context(model.lock)
            request.check_open()
            yield FetchedKV(request, plan, reader, stream, time.perf_counter())

    def _stream(
        self, plan: LoadPlan, far: Sequence[Fetch], left_s: float, request: Request
    ) -> Stream:
        """Return the stream of the fetches from remote tiers."""
        runtime, model, tier = request.runtime, request.model, far[0].tier
        costs = runtime.timings.costs(model)
        terms = Terms(
            began_s=time.perf_counter(),
            deadline_s=left_s,
            base_s=costs.fused_s(Blend.of(plan)) if costs is not None else 0.0,
            piece_tokens=runtime.settings.piece_tokens,
            prior=costs.throughput(tier) if costs is not None else None,
        )
        parts = parts_of(plan, far, costs)
        return Stream(
            runtime.store, parts, model.n_layers, runtime.links.of(tier), terms, model.device
        )


def _part(kv: LayerKV | None, rows: tuple[int, int] | None) -> LayerKV | None:
    if kv is None or rows is None:
        return kv
    lo, hi = rows
    return LayerKV(kv.keys[:, lo:hi], kv.values[:, lo:hi])


def _revived(plan: LoadPlan, left_s: float, remote: Collection[str]) -> LoadPlan:
    """Return the plan with the entries of remote tiers that it did not read: at another level they
    may be in time.

    A full prefill that meets the deadline stays a full prefill.
    """
    revived = {fetch.segment: fetch for fetch in plan.unread if fetch.tier in remote}
    is_late = plan.forecast is None or plan.forecast.full_s > left_s
    if not revived or (plan.fallback_reason and not is_late):
        return plan
    fetches = sorted((*plan.fetches, *revived.values()), key=lambda fetch: fetch.segment)
    misses = tuple((at, why) for at, why in plan.misses if at not in revived)
    unread = tuple(fetch for fetch in plan.unread if fetch.segment not in revived)
    return replace(plan, fallback_reason="", fetches=tuple(fetches), misses=misses, unread=unread)


def _after(plan: LoadPlan, stream: Stream) -> LoadPlan:
    """Return the plan with the levels at which segments arrived, and with those that did not arrive
    computed.

    These count as stored but unread, except those whose bytes are unreadable.
    """
    why, fetches = stream.text, list[Fetch]()
    for fetch in plan.fetches:
        level, nbytes = stream.received.get(fetch.segment, (fetch.level, fetch.nbytes))
        if fetch.segment not in why:
            fetches.append(replace(fetch, level=level, nbytes=nbytes))
    removed = [f for f in plan.fetches if why.get(f.segment, BYTES_UNREADABLE) != BYTES_UNREADABLE]
    unread = tuple(sorted((*plan.unread, *removed), key=lambda fetch: fetch.segment))
    misses = tuple(sorted({**dict(plan.misses), **why}.items()))
    planned = (
        replace(plan, fetches=tuple(fetches)) if fetches else plan.with_full_prefill(NOTHING_CAME)
    )
    return replace(planned, misses=misses, unread=unread)
