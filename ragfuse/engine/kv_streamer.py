"""KV streaming: for a question with a deadline, KV in remote tiers is read before the prefill (CacheGen 5.3).

`plan` and `load.stream` decide what is streamed and at which level; this file makes a prompt's plan from what arrived.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.engine.request import Request
from ragfuse.hf.model import HFModel
from ragfuse.load.link import Links
from ragfuse.load.stream import BYTES_UNREADABLE, Stream, Terms
from ragfuse.plan.cost import Blend
from ragfuse.plan.stream_level import parts_of
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.types.answer import StreamTrace
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import Fetch, LoadPlan

NOTHING_CAME = "nothing of it came in time over the line"


@dataclass
class StreamedPlan:
    """A prompt's plan, with the KV that was streamed for it; a context manager that closes the stream.

    Args:
        began_s: `time.perf_counter()` when the deadline began to run.
        plan: The plan; it reads only what arrived.
        deadline_s: Seconds from `began_s` to the first token.
        stream: The stream; None where nothing was to be streamed.
        terms: The stream's terms.
    """

    began_s: float
    plan: LoadPlan
    deadline_s: float
    stream: Stream | None = None
    terms: Terms | None = None

    @property
    def due_s(self) -> float:
        """`time.perf_counter()` at the deadline of the first token."""
        return self.began_s + self.deadline_s

    @property
    def streamed(self) -> frozenset[int]:
        """Indices of segments whose KV arrived."""
        return frozenset(self.stream.received if self.stream is not None else ())

    def read(self, layer: int) -> dict[int, LayerKV | None]:
        """Return the KV of one layer that arrived, by segment; None for a segment that cannot be decoded."""
        found = self.stream.read(layer) if self.stream is not None else {}
        return {at: kv for at, kv in found.items() if at in self.streamed}

    def trace(self) -> StreamTrace | None:
        """Return how the KV was streamed; its `held` is set once the first token is there. None without a stream."""
        if self.stream is None or self.terms is None:
            return None
        return StreamTrace(self.deadline_s, False, tuple(self.stream.pieces), self.terms.prior)

    def close(self) -> None:
        """Close the stream, once the prompt is prefilled or given up."""
        if self.stream is not None:
            self.stream.close()

    def __enter__(self) -> StreamedPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class KVStreamer:
    """Streams the KV that prompts need from the remote tiers of a store.

    Args:
        settings: The tokens of a piece, and what happens to prompts that are too long.
        store: The store.
        timings: Timings of this machine.
        links: The links to remote tiers, with their throughput.
        prefetcher: Skips the entries that a prompt reads by itself.
    """

    settings: Settings
    store: KVStore
    timings: MachineTimings
    links: Links
    prefetcher: Prefetcher

    def stream(self, plan: LoadPlan, request: Request) -> StreamedPlan | None:
        """Stream the KV of a prompt, and return its plan with everything that arrived in time.

        Returns:
            The plan; None where there is no deadline or no remote tier.
        """
        began_s, deadline_s = time.perf_counter(), request.ask.deadline_s
        remote = {tier.name for tier in self.store.tiers if tier.remote}
        if deadline_s is None or not request.ask.reuse or not remote:
            return None
        streamed = StreamedPlan(began_s, _revived(plan, deadline_s, remote), deadline_s)
        far = [fetch for fetch in streamed.plan.fetches if fetch.tier in remote]
        if far:
            self.prefetcher.skip(fetch.key for fetch in streamed.plan.fetches)
            self._run(streamed, far, request.model)
        return streamed

    def _run(self, streamed: StreamedPlan, far: Sequence[Fetch], model: HFModel) -> None:
        plan, costs, tier = streamed.plan, self.timings.costs(model), far[0].tier
        streamed.terms = terms = Terms(
            streamed.began_s,
            streamed.deadline_s,
            costs.fused_s(Blend.of(plan)) if costs is not None else 0.0,
            self.settings.piece_tokens,
            costs.throughput(tier) if costs is not None else None,
        )
        parts, link = parts_of(plan, far, costs), self.links.of(tier)
        streamed.stream = stream = Stream(self.store, far, parts, model.n_layers, link, terms, model.device)
        try:
            stream.run()
        except BaseException:
            stream.close()
            raise
        streamed.plan = _after(plan, stream)


def _revived(plan: LoadPlan, deadline_s: float, remote: set[str]) -> LoadPlan:
    """Return the plan with the entries of remote tiers that it did not read: at another level they may be in time.

    A full prefill that meets the deadline stays a full prefill.
    """
    revived = [fetch for fetch in plan.unread if fetch.tier in remote]
    is_late = plan.forecast is None or plan.forecast.full_s > deadline_s
    if not revived or (plan.fallback_reason and not is_late):
        return plan
    fetches = sorted((*plan.fetches, *revived), key=lambda fetch: fetch.segment)
    segments = {fetch.segment for fetch in revived}
    misses = tuple((at, why) for at, why in plan.misses if at not in segments)
    unread = tuple(fetch for fetch in plan.unread if fetch.segment not in segments)
    return replace(plan, fallback_reason="", fetches=tuple(fetches), misses=misses, unread=unread)


def _after(plan: LoadPlan, stream: Stream) -> LoadPlan:
    """Return the plan with the levels at which segments arrived, and without those that did not arrive."""
    fetches = tuple(
        replace(fetch, level=stream.received[fetch.segment][0], nbytes=stream.received[fetch.segment][1])
        if fetch.segment in stream.received
        else fetch
        for fetch in plan.fetches
    )
    return _without(replace(plan, fetches=fetches), stream.text)


def _without(plan: LoadPlan, why: Mapping[int, str]) -> LoadPlan:
    """Return the plan with these segments computed, each for its reason.

    They count as stored but unread, except those whose bytes are unreadable.
    """
    fetches = tuple(fetch for fetch in plan.fetches if fetch.segment not in why)
    removed = [f for f in plan.fetches if why.get(f.segment, BYTES_UNREADABLE) != BYTES_UNREADABLE]
    unread = tuple(sorted((*plan.unread, *removed), key=lambda fetch: fetch.segment))
    misses = tuple(sorted({**dict(plan.misses), **why}.items()))
    if fetches:
        return replace(plan, fetches=fetches, misses=misses, unread=unread)
    return replace(plan.with_full_prefill(NOTHING_CAME), misses=misses, unread=unread)
