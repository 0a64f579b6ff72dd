"""Stage 3, prefill: read the cached KV of a plan layer by layer, acquire the model, and compute
the first logits.

If the question has a deadline, KV in remote tiers is streamed before the model is acquired
(CacheGen 5.3): `plan` and `load.stream` decide what comes and at which level, and the plan reads
only what came. While another prompt uses the model, the first layers of the next one are read
(AttentionStore 3.2.1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

from ragfuse.engine.planner import Planner
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.request import PreparedPrompt, Request
from ragfuse.fuse.fusor import CachedRun, LostRun
from ragfuse.hf.decode import FairLock
from ragfuse.hf.kept_states import States
from ragfuse.hf.model import HFModel, KVSource, Prefill
from ragfuse.load.layers import LayerReader
from ragfuse.load.stream import BYTES_UNREADABLE, Link, Stream
from ragfuse.plan.cost import Blend
from ragfuse.plan.look_ahead import layers_before
from ragfuse.plan.stream_level import parts_of
from ragfuse.telemetry.otel import fused, loading
from ragfuse.types.answer import StreamTrace
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import Fetch, LoadPlan, is_blended
from ragfuse.types.prompt import Prompt

NOTHING_CAME = "nothing of it came in time over the line"


@dataclass(frozen=True)
class _CachedKV:
    """The cached KV of a prompt, layer by layer.

    Args:
        prompt: The prompt.
        reader: Reads the layers of the segments that were not streamed.
        stream: KV that was streamed under a deadline; None: nothing was.
    """

    prompt: Prompt
    reader: LayerReader
    stream: Stream | None

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Return the KV of a layer by segment, its rows alone; None for a segment that cannot be
        read.
        """
        found = dict(self.reader.read(layer))
        if self.stream is not None:
            found |= self.stream.read(layer)
        return {at: _part(kv, self.prompt.segments[at].rows) for at, kv in found.items()}

    def ready(self) -> int:
        """Return how many of the next layers need no waiting; 0 where some are still decoded from a
        stream.
        """
        return self.reader.ready() if self.stream is None else 0


class Prefiller:
    """Prefills the prompts of an engine.

    Args:
        planner: Plans them.
        prefixes: Knows which of them wait for one another, and keeps the states of models whose
            cache is not KV per token.
        prefetcher: Skips keys that a prompt reads itself.
    """

    def __init__(self, planner: Planner, prefixes: PrefixCache, prefetcher: Prefetcher) -> None:
        self._planner, self._prefixes, self._prefetcher = planner, prefixes, prefetcher
        self._next = FairLock()  # of the one prompt that gets the model next, and reads ahead

    @contextmanager
    def prefilled(self, prompt: Prompt, request: Request) -> Iterator[PreparedPrompt]:
        """Plan, load and prefill a prompt, and hold the model; again without an entry that turns
        out unreadable.

        Raises:
            InputError: The request was cancelled; the prefill ends before its next layer.
        """
        lost, ask = frozenset[int](), request.ask
        waits = ask.reuse and ask.deadline_s is None and not request.model.lock.is_mine
        with self._prefixes.turn(prompt) if waits else nullcontext():
            while True:
                plan = self._planner.plan(prompt, request, lost)
                with ExitStack() as held:
                    try:
                        prepared = self._prefilled(plan, request, held)
                    except LostRun as error:
                        prompt, lost = plan.prompt, lost | {error.segment}
                        continue
                    yield prepared
                    return

    def _prefilled(self, plan: LoadPlan, request: Request, held: ExitStack) -> PreparedPrompt:
        """Carry out a plan, and note how long that took; `held` then holds the model and the
        layers.
        """
        runtime, model, left_s = request.runtime, request.model, request.left_s
        remote, far = {tier.name for tier in runtime.store.tiers if tier.remote}, list[Fetch]()
        if left_s is not None and request.ask.reuse:
            far = [fetch for fetch in plan.fetches if fetch.tier in remote]
        self._prefetcher.skip(fetch.key for fetch in plan.fetches)
        stream = None
        if far:
            stream = held.enter_context(_stream(plan, far, left_s or 0.0, request))
            stream.run()
            plan = _after(plan, stream)
        came = stream.received if stream is not None else ()
        rest = replace(
            plan, fetches=tuple(fetch for fetch in plan.fetches if fetch.segment not in came)
        )
        reader = LayerReader(
            runtime.store,
            rest.fetches,
            model.n_layers,
            rest.layers_a_read,
            model.device,
            layers_before(rest, model.n_layers),
        )
        with nullcontext() if model.lock.is_mine else self._next:
            held.enter_context(loading(reader, rest))
            held.enter_context(model.lock)
        request.check_open()
        began_s = time.perf_counter()
        states = self._prefixes.kept_states if request.ask.reuse and model.profile.state else None
        with model.before_layers(request.check_open):
            found = _computed(model, plan, _CachedKV(plan.prompt, reader, stream), states)
        load_s, wait_s, trace = reader.load_s, reader.wait_s, None
        compute_s = time.perf_counter() - began_s - reader.wait_s
        if stream is not None:
            load_s, wait_s = load_s + stream.load_s, wait_s + stream.load_s + stream.wait_s
            compute_s -= stream.wait_s
            trace = StreamTrace(tuple(stream.pieces), stream.prior)
        runtime.timings.note(
            model,
            plan,
            None if came else reader.load_s,
            None if model.profile.state else compute_s,
        )
        return PreparedPrompt(request, plan, found, load_s, wait_s, compute_s, trace)


@fused
def _computed(model: HFModel, plan: LoadPlan, cached: _CachedKV, states: States | None) -> Prefill:
    """Compute what the plan does not load: the whole prompt, the tokens after a kept state, or the
    selected rows.
    """
    prompt = plan.prompt
    if plan.fallback_reason and model.profile.state and prompt.schema_use is None:
        return model.prefill_state(prompt.token_ids, states)
    if plan.fallback_reason:
        return model.full_prefill(prompt.token_ids, prompt.positions)
    runs = list[CachedRun]()
    for fetch in plan.fetches:
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        runs.append(CachedRun(fetch.segment, lo, hi, segment.shift, is_blended(prompt, fetch)))
    ids, positions, asked = prompt.token_ids, prompt.positions, prompt.question_rows
    source = cached if runs else KVSource()
    return model.fuse(ids, positions, runs, source, plan.policy, plan.ratio, question_rows=asked)


def _stream(plan: LoadPlan, far: Sequence[Fetch], left_s: float, request: Request) -> Stream:
    """Return the stream of the fetches from remote tiers."""
    runtime, model, tier = request.runtime, request.model, far[0].tier
    costs = runtime.timings.costs(model)
    return Stream(
        runtime.store,
        parts_of(plan, far, costs),
        model.n_layers,
        runtime.links.setdefault(tier, Link(runtime.settings.streams)),
        left_s,
        costs.fused_s(Blend.of(plan)) if costs is not None else 0.0,
        costs.throughput(tier) if costs is not None else None,
        model.device,
    )


def _part(kv: LayerKV | None, rows: tuple[int, int] | None) -> LayerKV | None:
    if kv is None or rows is None:
        return kv
    lo, hi = rows
    return LayerKV(kv.keys[:, lo:hi], kv.values[:, lo:hi])


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
