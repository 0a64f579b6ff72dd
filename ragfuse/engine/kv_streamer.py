"""What lies behind a line is brought before the model is needed, where a question has a deadline (CacheGen 5.3).

What is brought and how is told by `plan` and `load.stream`; what that makes of a prompt's plan, here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from ragfuse.engine.options import Ask
from ragfuse.engine.overflow import drops, room_of
from ragfuse.engine.planner import Planner
from ragfuse.hf.model import HFModel
from ragfuse.load.layers import LayerReader
from ragfuse.load.link import Links
from ragfuse.load.stream import Stream
from ragfuse.load.terms import UNREADABLE, Terms
from ragfuse.plan.adapt import Adapt
from ragfuse.plan.estimate import Estimate
from ragfuse.plan.pieces import base_s, parts_of, prior
from ragfuse.settings import LEVELS, Settings
from ragfuse.store import KVStore
from ragfuse.store.tier import Breaks
from ragfuse.telemetry.otel import planned
from ragfuse.types.answer import StreamTrace
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import Fetch, LoadPlan
from ragfuse.types.profiles import ModelProfile
from ragfuse.types.prompt import Prompt

NOTHING_CAME = "nothing of it came in time over the line"


@dataclass
class Brought:
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
        self.plan = _without(self.plan, {segment: UNREADABLE})

    def over(self, reader: LayerReader) -> Source:
        """All layers: what came, and what is read beside it."""
        return Source(reader, self.stream, self.streamed)

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

    def __enter__(self) -> Brought:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Source:
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
class Bringer:
    """Brings what prompts need over the lines of a store. `reads` hears of the keys that a prompt reads for itself."""

    settings: Settings
    store: KVStore
    planner: Planner
    links: Links
    reads: Callable[[Iterable[ChunkKey]], None]

    @contextmanager
    def all(
        self, prompts: Sequence[Prompt], ask: Ask, model: HFModel, profile: ModelProfile
    ) -> Iterator[list[Brought | None]]:
        """What came for each of these prompts, all at the same time; let go of in the end."""
        with ExitStack() as held:
            bring = partial(self.bring, ask=ask, model=model, profile=profile)
            if len(prompts) > 1 and self._lines(ask):
                with ThreadPoolExecutor(len(prompts), "ragfuse-bring") as pool:
                    found = list(pool.map(bring, prompts))
            else:
                found = [bring(prompt) for prompt in prompts]
            for brought in found:
                if brought is not None:
                    held.enter_context(brought)
            yield found

    def bring(self, prompt: Prompt, ask: Ask, model: HFModel, profile: ModelProfile) -> Brought | None:
        """The plan, with all that came in time; None where nothing is in a hurry, or no tier is behind a line."""
        began, lines = time.perf_counter(), self._lines(ask)
        if ask.deadline_s is None or not lines:
            return None
        room_of(prompt, model, drops(ask, self.settings))
        chosen = _revived(planned(self.planner.plan)(prompt, ask, model, profile), ask.deadline_s, lines)
        brought = Brought(began, chosen, ask.deadline_s)
        far = [fetch for fetch in chosen.fetches if fetch.tier in lines]
        if far:
            self.reads(fetch.key for fetch in chosen.fetches)
            self._run(brought, far, model)
        return brought

    def _lines(self, ask: Ask) -> set[str]:
        """Tiers behind lines, where a question hurries that may use them."""
        hurries = ask.deadline_s is not None and ask.reuse
        return {tier.name for tier in self.store.tiers if hurries and isinstance(tier, Breaks)}

    def _run(self, brought: Brought, far: Sequence[Fetch], model: HFModel) -> None:
        machine, plan, settings = self.planner.timings.corrected(model), brought.plan, self.settings
        times, row_s = Estimate(machine) if machine is not None else None, self.planner.timings.row_s(model)
        brought.terms = terms = Terms(
            brought.began_s,
            brought.deadline_s,
            base_s(plan, times, row_s),
            cast(Adapt, "paper" if settings.adapt in LEVELS else settings.adapt),
            settings.piece_tokens,
            prior(far, times),
            settings.adapt if settings.adapt in LEVELS else None,
        )
        parts, link = parts_of(plan, far, times, row_s), self.links.of(far[0].tier)
        brought.stream = stream = Stream(self.store, far, parts, model.n_layers, link, terms, model.device)
        try:
            stream.run()
        except BaseException:
            stream.close()
            raise
        brought.plan = _after(plan, stream)


def _revived(plan: LoadPlan, deadline_s: float, lines: set[str]) -> LoadPlan:
    """With what was left unread only because it is far: at another level it may come in time.

    A prompt that is prefilled in full within its deadline stays so.
    """
    back = [fetch for fetch in plan.unread if fetch.tier in lines]
    late = plan.forecast is None or plan.forecast.full_s > deadline_s
    if not back or (plan.refusal and not late):
        return plan
    fetches = sorted((*plan.fetches, *back), key=lambda fetch: fetch.segment)
    there = {fetch.segment for fetch in back}
    misses = tuple((at, why) for at, why in plan.misses if at not in there)
    unread = tuple(fetch for fetch in plan.unread if fetch.segment not in there)
    return replace(plan, refusal="", fetches=tuple(fetches), misses=misses, unread=unread)


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
    gone = [f for f in plan.fetches if why.get(f.segment, UNREADABLE) != UNREADABLE]
    unread = tuple(sorted((*plan.unread, *gone), key=lambda fetch: fetch.segment))
    misses = tuple(sorted({**dict(plan.misses), **why}.items()))
    if kept:
        return replace(plan, fetches=kept, misses=misses, unread=unread)
    return replace(plan.refused(NOTHING_CAME), misses=misses, unread=unread)
