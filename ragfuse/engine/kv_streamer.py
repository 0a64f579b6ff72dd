"""What lies behind a line is streamed before the model is needed, where a question has a deadline (CacheGen 5.3).

`plan` and `load.stream` decide what is streamed and how; this file makes a prompt's plan of what came.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.options import Ask
from ragfuse.engine.overflow import drops, room_of
from ragfuse.engine.planner import RevisablePlan
from ragfuse.engine.prefetch import Prefetcher
from ragfuse.hf.model import HFModel
from ragfuse.load.layers import LayerReader
from ragfuse.load.link import Links
from ragfuse.load.stream import Stream
from ragfuse.load.terms import BYTES_UNREADABLE, Terms
from ragfuse.plan.adapt import Adapt
from ragfuse.plan.estimate import Estimate
from ragfuse.plan.pieces import base_s, parts_of, prior
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.store.tier import Breaks
from ragfuse.types.answer import StreamTrace
from ragfuse.types.kv import LayerKV
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import Fetch, LoadPlan

NOTHING_CAME = "nothing of it came in time over the line"


@dataclass
class StreamedPlan:
    """A prompt's plan, and what came over a line for it, if anything was to. A context manager: it ends in `close`.

    began_s: `time.perf_counter()` when its deadline began to run.
    """

    began_s: float
    plan: LoadPlan
    deadline_s: float
    stream: Stream | None = None
    terms: Terms | None = None
    lost: set[int] = field(default_factory=set)

    @property
    def due_s(self) -> float:
        """`time.perf_counter()` when the first token is wanted."""
        return self.began_s + self.deadline_s

    @property
    def streamed(self) -> frozenset[int]:
        """Segments that came and are to be used."""
        return frozenset(self.stream.came if self.stream is not None else ()) - self.lost

    def lose(self, segment: int) -> None:
        """It came, or was there, and cannot be used: it is computed."""
        self.lost.add(segment)
        self.plan = _without(self.plan, {segment: BYTES_UNREADABLE})

    def over(self, reader: LayerReader) -> StreamedSource:
        """All layers: what came, and what is read beside it."""
        return StreamedSource(reader, self.stream, self.streamed)

    def trace(self) -> StreamTrace | None:
        """What happened on the line; `held` is not known yet."""
        if self.stream is None or self.terms is None:
            return None
        terms = self.terms
        return StreamTrace(terms.level or terms.adapt, self.deadline_s, False, tuple(self.stream.pieces), terms.prior)

    def close(self) -> None:
        """Nothing more of what came is needed: the prompt is prefilled, or never will be."""
        if self.stream is not None:
            self.stream.close()

    def __enter__(self) -> StreamedPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class StreamedSource:
    """Layers by segment, from a reader and from what came over a line."""

    reader: LayerReader
    stream: Stream | None
    streamed: frozenset[int]

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """Those of both."""
        found = dict(self.reader.read(layer))
        if self.stream is not None:
            found |= {at: kv for at, kv in self.stream.read(layer).items() if at in self.streamed}
        return found


@dataclass(frozen=True)
class KVStreamer:
    """Brings what prompts need over the lines of a store.

    prefetcher: leaves alone what a prompt reads for itself.
    """

    settings: Settings
    store: KVStore
    timings: MachineTimings
    links: Links
    prefetcher: Prefetcher

    def stream(self, plan: RevisablePlan) -> StreamedPlan | None:
        """Return the plan of a prompt with all that came in time.

        None where no deadline is set, or no tier is behind a line.
        """
        request, began = plan.request, time.perf_counter()
        ask, lines = request.ask, self._lines(request.ask)
        if ask.deadline_s is None or not lines:
            return None
        room_of(plan.prompt, request.model, drops(ask, self.settings))
        chosen = _revived(plan.make(), ask.deadline_s, lines)
        streamed = StreamedPlan(began, chosen, ask.deadline_s)
        far = [fetch for fetch in chosen.fetches if fetch.tier in lines]
        if far:
            self.prefetcher.leave(fetch.key for fetch in chosen.fetches)
            self._run(streamed, far, request.model)
        return streamed

    def _lines(self, ask: Ask) -> set[str]:
        """Tiers behind lines, where a question hurries that may use them."""
        hurries = ask.deadline_s is not None and ask.reuse
        return {tier.name for tier in self.store.tiers if hurries and isinstance(tier, Breaks)}

    def _run(self, streamed: StreamedPlan, far: Sequence[Fetch], model: HFModel) -> None:
        machine, plan, settings = self.timings.corrected(model), streamed.plan, self.settings
        times, row_s = Estimate(machine) if machine is not None else None, self.timings.row_s(model)
        streamed.terms = terms = Terms(
            streamed.began_s,
            streamed.deadline_s,
            base_s(plan, times, row_s),
            cast(Adapt, "paper" if settings.adapt in LEVEL_NAMES else settings.adapt),
            settings.piece_tokens,
            prior(far, times),
            settings.adapt if settings.adapt in LEVEL_NAMES else None,
        )
        parts, link = parts_of(plan, far, times, row_s), self.links.of(far[0].tier)
        streamed.stream = stream = Stream(self.store, far, parts, model.n_layers, link, terms, model.device)
        try:
            stream.run()
        except BaseException:
            stream.close()
            raise
        streamed.plan = _after(plan, stream)


def _revived(plan: LoadPlan, deadline_s: float, lines: set[str]) -> LoadPlan:
    """With what was left unread only because it is far: at another level it may come in time.

    A prompt that is prefilled in full within its deadline stays so.
    """
    back = [fetch for fetch in plan.unread if fetch.tier in lines]
    late = plan.forecast is None or plan.forecast.full_s > deadline_s
    if not back or (plan.fallback_reason and not late):
        return plan
    fetches = sorted((*plan.fetches, *back), key=lambda fetch: fetch.segment)
    there = {fetch.segment for fetch in back}
    misses = tuple((at, why) for at, why in plan.misses if at not in there)
    unread = tuple(fetch for fetch in plan.unread if fetch.segment not in there)
    return replace(plan, fallback_reason="", fetches=tuple(fetches), misses=misses, unread=unread)


def _after(plan: LoadPlan, stream: Stream) -> LoadPlan:
    """The plan with what came at the levels at which it came, and without what did not."""
    fetches = tuple(
        replace(fetch, level=stream.came[fetch.segment][0], nbytes=stream.came[fetch.segment][1])
        if fetch.segment in stream.came
        else fetch
        for fetch in plan.fetches
    )
    return _without(replace(plan, fetches=fetches), stream.text)


def _without(plan: LoadPlan, why: Mapping[int, str]) -> LoadPlan:
    """The plan with these segments computed, and why; they are there all the same, but for what cannot be read."""
    kept = tuple(fetch for fetch in plan.fetches if fetch.segment not in why)
    gone = [f for f in plan.fetches if why.get(f.segment, BYTES_UNREADABLE) != BYTES_UNREADABLE]
    unread = tuple(sorted((*plan.unread, *gone), key=lambda fetch: fetch.segment))
    misses = tuple(sorted({**dict(plan.misses), **why}.items()))
    if kept:
        return replace(plan, fetches=kept, misses=misses, unread=unread)
    return replace(plan.with_full_prefill(NOTHING_CAME), misses=misses, unread=unread)
