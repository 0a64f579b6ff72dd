"""Stages 2 and 3, plan and prefill: plan the reads, read layer by layer, acquire the model, and
compute the first logits.

With a deadline, KV in remote tiers is streamed before the model is acquired (CacheGen 5.3). While
one prompt uses the model, the next prompt's first layers are read (AttentionStore 3.2.1).
`ragfuse.plan` decides what is read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

from ragfuse.engine.model_records import hint, refusal_of
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.remember import Prefetcher
from ragfuse.engine.request import PreparedPrompt, Request
from ragfuse.engine.runtime import Runtime
from ragfuse.fuse.fusor import CachedRun, LostRun
from ragfuse.fuse.select import cost_of
from ragfuse.hf.decode import FairLock
from ragfuse.hf.kept_states import States
from ragfuse.hf.model import HFModel, Prefill
from ragfuse.load.layers import LayerReader
from ragfuse.load.stream import BYTES_UNREADABLE, Link, Stream
from ragfuse.plan.controller import Controller
from ragfuse.plan.cost import Blend
from ragfuse.plan.stream_level import parts_of
from ragfuse.telemetry.otel import fused, loading, planned
from ragfuse.types.answer import StreamTrace
from ragfuse.types.plan import (
    AUTO,
    DOCUMENTS_ALTERED,
    ENCODING,
    FULL_PREFILL_ASKED,
    MISSING,
    NOT_ENCODED,
    NOTHING_STORED,
    PROMPT_TOO_SHORT,
    Fetch,
    LoadPlan,
    is_blended,
)
from ragfuse.types.prompt import Prompt, Segment

log = logging.getLogger("ragfuse.engine")

MIN_PROMPT_TOKENS = 32
"""Prompts with fewer tokens are reported as too short for reuse."""


NOTHING_CAME = "the stored KV did not arrive in time"


class PrefillStage:
    """Plans and prefills the prompts of an engine.

    Args:
        runtime: Provides the machine's timings, the store, and the queue of chunks to encode.
        prefixes: Finds the cached prefixes of prompts. Makes prompts with the same new prefix wait
            for each other. Stores the states of models whose cache is not KV per token.
        prefetcher: The prefetcher, which is told to skip the keys that a prompt reads.
    """

    def __init__(self, runtime: Runtime, prefixes: PrefixCache, prefetcher: Prefetcher) -> None:
        self._runtime, self._prefixes, self._store = runtime, prefixes, runtime.store
        self._prefetcher, self._is_hinted = prefetcher, False
        self._next = FairLock()  # held by the prompt that gets the model next and reads ahead

    @planned
    def plan(
        self, prompt: Prompt, request: Request, lost: frozenset[int] = frozenset()
    ) -> LoadPlan:
        """Look up the KV of a prompt, and plan what is read and what is computed.

        Args:
            prompt: The built prompt, or the prompt of the previous plan if `lost` is not empty.
            request: The request.
            lost: Indices of segments whose entries could not be read.

        Returns:
            The plan. In `LoadPlan.prompt`, hits of the prefix cache are segments of kind "prefix".
        """
        profile, ask, settings = self._runtime.profile, request.ask, self._runtime.settings
        if ask.reuse and not lost:
            prompt = self._prefixes.placed(prompt)
        policy, costs = ask.policy or settings.policy, self._runtime.timings.costs(request.model)
        controller = Controller(
            cost_of,
            costs,
            profile.default_choice,
            policy,
            settings.ratio if ask.ratio is None else ask.ratio,
            request.left_s,
            [tier.name for tier in self._store.tiers if tier.remote],
        )
        shifts = [each.shift for each in prompt.segments if each.kind in ("prefix", "history")]
        moves = prompt.schema_use is None and (not shifts or any(shifts))
        refusal = refusal_of(profile, policy, blends=False, moves=moves)
        if refusal or not ask.reuse:
            why = refusal if ask.reuse else FULL_PREFILL_ASKED
            return controller.plan(prompt, {}).with_full_prefill(why)
        chunks = {at for at, segment in enumerate(prompt.segments) if segment.kind == "chunk"}
        # the reason why chunks may not be blended; the prompt's other segments are still read
        unblended = refusal_of(profile, policy) if chunks else ""
        keys = [
            key
            for at, each in enumerate(prompt.segments)
            for key in each.keys
            if not (unblended and at in chunks)
        ]
        entries = self._store.lookup(keys)
        found = controller.plan(prompt, entries, lost)
        misses = list[tuple[int, str]]()
        for at, why in found.misses:
            if unblended and at in chunks:
                misses.append((at, unblended))
            # a prefix segment that is not in the store is new text, not a miss
            elif (prompt.segments[at].kind, why) != ("prefix", MISSING):
                misses.append((at, self._explained(prompt.segments[at], why)))
        found = replace(found, misses=tuple(misses))
        if found.fetches or found.fallback_reason:
            is_default = policy == AUTO and profile.choice is None
            if chunks and not unblended and is_default and not self._is_hinted:
                self._is_hinted = True
                hint(profile, settings, request.model)
            return found
        why = unblended
        if not why:
            is_pending = any(why == ENCODING for _, why in found.misses)
            why = ENCODING if is_pending else self._why_nothing(prompt, bool(lost))
        return replace(found.with_full_prefill(why), misses=() if unblended else found.misses)

    def _explained(self, segment: Segment, why: str) -> str:
        """Return a more precise reason for a miss: still being encoded, or not decodable here."""
        if why != MISSING:
            return why
        if segment.run in self._runtime.jobs.names:
            return ENCODING
        return next(filter(None, map(self._store.levels.why_not, segment.keys)), why)

    def _why_nothing(self, prompt: Prompt, lost: bool) -> str:
        """Return the reason why no KV was found, with the names of tiers that do not respond."""
        if len(prompt) < MIN_PROMPT_TOKENS:
            return f"{PROMPT_TOO_SHORT}: {len(prompt)} tokens"
        # this lookup has set `answers` of each tier; slow tiers are not asked again
        silent = self._store.silent()
        if prompt.altered:
            return DOCUMENTS_ALTERED
        if silent:
            return f"{NOTHING_STORED}, as far as is known: {' and '.join(silent)} not answering"
        has_chunks = any(segment.kind == "chunk" for segment in prompt.segments)
        return NOT_ENCODED if has_chunks and not lost else NOTHING_STORED

    @contextmanager
    def prepared(self, prompt: Prompt, request: Request) -> Iterator[PreparedPrompt]:
        """Plan, load and prefill a prompt. The model stays locked until the `with` block ends.

        If an entry cannot be read, the prompt is planned again without this entry.

        Raises:
            InputError: The request was cancelled; the prefill stopped before its next layer.
        """
        lost, ask = frozenset[int](), request.ask
        waits = ask.reuse and ask.deadline_s is None and not request.model.lock.is_mine
        with self._prefixes.turn(prompt) if waits else nullcontext():
            while True:
                plan = self.plan(prompt, request, lost)
                with ExitStack() as held:
                    try:
                        prepared = self._prepared(plan, request, held)
                    except LostRun as error:
                        prompt, lost = plan.prompt, lost | {error.segment}
                        continue
                    yield prepared
                    return

    def _prepared(self, plan: LoadPlan, request: Request, held: ExitStack) -> PreparedPrompt:
        """Execute a plan; exiting `held` unlocks the model and closes the layer reader."""
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
        reader = LayerReader(runtime.store, plan, model.n_layers, model.device, stream)
        with nullcontext() if model.lock.is_mine else self._next:
            held.enter_context(loading(reader))
            held.enter_context(reader)
            held.enter_context(model.lock)
        request.check_open()
        began_s = time.perf_counter()
        states = self._prefixes.kept_states if request.ask.reuse and model.profile.state else None
        with model.before_layers(request.check_open):
            found = _computed(model, plan, reader, states)
        compute_s = time.perf_counter() - began_s - reader.wait_s
        streamed_s, trace = 0.0, None
        if stream is not None:
            streamed_s, trace = stream.load_s, StreamTrace(tuple(stream.pieces), stream.prior)
        runtime.timings.note(
            model,
            plan,
            reader.load_s if len(reader.fetches) == len(plan.fetches) else None,
            None if model.profile.state else compute_s,
        )
        return PreparedPrompt(
            request,
            plan,
            found,
            reader.load_s + streamed_s,
            reader.wait_s + streamed_s,
            compute_s,
            trace,
        )


@fused
def _computed(
    model: HFModel, plan: LoadPlan, cached: LayerReader, states: States | None
) -> Prefill:
    """Prefill the whole prompt or the tokens after a kept state, or fuse the loaded KV."""
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
    return model.fuse(ids, positions, runs, cached, plan.policy, plan.ratio, question_rows=asked)


def _stream(plan: LoadPlan, far: Sequence[Fetch], left_s: float, request: Request) -> Stream:
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


def _after(plan: LoadPlan, stream: Stream) -> LoadPlan:
    """Return the plan with the codec levels that were streamed.

    Segments that did not arrive are computed. Such segments count as stored but unread, unless
    their bytes were unreadable.
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
