"""From a prompt to its first logits: plan, read, fuse; once more without an entry that is lost on the way.

What is read and computed is told by the plan, which fusing obeys. While the model is another prompt's, the next one is
planned and its first layers are read (`Ahead`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from ragfuse.engine.kv_streamer import Brought
from ragfuse.engine.options import Ask, hurried
from ragfuse.engine.overflow import drops, room_of
from ragfuse.engine.planner import Planner
from ragfuse.engine.trace_builder import Ready, Timing
from ragfuse.fuse.fusor import LostRun, Run, Source
from ragfuse.hf.lock import FairLock
from ragfuse.hf.model import HFModel, NoSource, Prefill
from ragfuse.hf.states import TenantStates
from ragfuse.load.layers import LayerReader
from ragfuse.plan.controller import is_exact
from ragfuse.plan.look_ahead import layers_before
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.telemetry.otel import fused, loading, planned
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import LayerKV
from ragfuse.types.plan import LoadPlan
from ragfuse.types.profiles import ModelProfile
from ragfuse.types.prompt import Prompt


@dataclass
class Ahead:
    """What is known and read of a prompt before the model is its own: its plan, and layers on their way from there.

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


@dataclass(frozen=True)
class Prefiller:
    """Prefills an engine's prompts. `reads` hears of the keys that a prompt reads for itself."""

    settings: Settings
    store: KVStore
    planner: Planner
    reads: Callable[[Iterable[ChunkKey]], None]
    _place: FairLock = field(default_factory=FairLock)

    @contextmanager
    def turn(
        self, prompt: Prompt, ask: Ask, model: HFModel, profile: ModelProfile, brought: Brought | None = None
    ) -> Iterator[Ahead]:
        """The model's lock, and what was read meanwhile by the prompt that waits for it next (AttentionStore 3.2.1).

        It reads as many layers as a read buffer holds, by what this machine was measured to take. Where there is a
        deadline, what is brought is `kv_streamer.py`'s.
        """
        if ask.reuse and not model.lock.is_mine:
            self.planner.settle(prompt)
        with ExitStack() as held:
            ahead = Ahead()
            held.callback(ahead.close)
            if model.lock.is_anothers and ask.deadline_s is None and brought is None:
                ahead.place.enter_context(self._place)
                if model.lock.is_anothers:
                    room_of(prompt, model, drops(ask, self.settings))
                    chosen = self._planned(prompt, ask, model, profile)
                    ahead.begin(chosen, self._reader(chosen, model))
            held.enter_context(model.lock)
            ahead.place.close()
            yield ahead

    def prepare(
        self,
        prompt: Prompt,
        ask: Ask,
        model: HFModel,
        profile: ModelProfile,
        brought: Brought | None = None,
        ahead: Ahead | None = None,
    ) -> Ready:
        """The prefilled prompt; InputError if it is longer than the model can take.

        brought: what came for it over a line, and its plan. ahead: what was read before its turn.
        """
        ahead = ahead or Ahead()
        room = room_of(prompt, model, drops(ask, self.settings))
        began, lost = time.perf_counter(), frozenset[int]()
        prompt = brought.plan.prompt if brought is not None else prompt
        since = brought.began_s if brought is not None else began
        while True:
            if brought is not None and (brought.stream is not None or not lost):
                chosen = brought.plan
            else:
                left, is_first = hurried(ask, time.perf_counter() - since), ahead.plan is None or bool(lost)
                chosen = self._planned(prompt, left, model, profile, lost, is_first)
            came = brought.streamed if brought is not None else frozenset[int]()
            near = replace(chosen, fetches=tuple(fetch for fetch in chosen.fetches if fetch.segment not in came))
            try:
                with ahead.reader(near) or loading(self._reader(near, model), near) as reader:
                    kept = self.planner.kept() if ask.reuse and model.profile.state else None
                    layers = brought.over(reader) if brought is not None else reader
                    prefill = _prefill(model, chosen, layers, kept)
            except LostRun as gone:
                lost, prompt = lost | {gone.segment}, chosen.prompt
                if brought is not None:
                    brought.lose(gone.segment)
                continue
            timing = _timing(since, began, reader, brought)
            if not came:
                self.planner.timings.saw(model, chosen, reader.load_s)
            if not model.profile.state:
                self.planner.timings.computed(model, chosen, timing.compute_s)
            return Ready(
                chosen,
                prefill,
                timing,
                room,
                brought.trace() if brought is not None else None,
            )

    def _planned(
        self,
        prompt: Prompt,
        ask: Ask,
        model: HFModel,
        profile: ModelProfile,
        lost: frozenset[int] = frozenset(),
        counts: bool = True,
    ) -> LoadPlan:
        """The plan, and the prefetcher hears of it. counts: as hits and misses; it was not planned before."""
        chosen = planned(self.planner.plan)(prompt, ask, model, profile, lost, counts)
        self.reads(fetch.key for fetch in chosen.fetches)
        return chosen

    def _reader(self, plan: LoadPlan, model: HFModel) -> LayerReader:
        before = layers_before(plan, model.n_layers)
        return LayerReader(self.store, plan.fetches, model.n_layers, plan.layers_a_read, model.device, before)


@dataclass(frozen=True)
class Parts:
    """Layers of a source, of some segments the rows lo:hi alone."""

    source: Source
    rows: Mapping[int, tuple[int, int]]

    def read(self, layer: int) -> Mapping[int, LayerKV | None]:
        """The layer's KV by segment."""
        found = self.source.read(layer)
        return {at: _part(kv, *self.rows[at]) if at in self.rows else kv for at, kv in found.items()}


def _part(kv: LayerKV | None, lo: int, hi: int) -> LayerKV | None:
    return LayerKV(kv.keys[:, lo:hi], kv.values[:, lo:hi]) if kv is not None else None


def _timing(since: float, began: float, reader: LayerReader, brought: Brought | None) -> Timing:
    """Seconds of one prompt, which were computed in from `began` on, but for what was waited for."""
    load_s, wait_s, due_s = reader.load_s, reader.wait_s, None
    compute_s = time.perf_counter() - began - wait_s
    if brought is not None:
        due_s = brought.due_s
    if brought is not None and brought.stream is not None:
        stream = brought.stream
        load_s, wait_s = load_s + stream.load_s, wait_s + stream.wait_s
        compute_s -= stream.wait_s - stream.load_s
    return Timing(since, load_s, wait_s, compute_s, due_s)


@fused
def _prefill(model: HFModel, chosen: LoadPlan, layers: Source, kept: TenantStates | None) -> Prefill:
    prompt = chosen.prompt
    if chosen.refusal and model.profile.state and prompt.taken is None:
        return model.begun(prompt.token_ids, kept)
    if chosen.refusal:
        return model.full_prefill(prompt.token_ids, prompt.positions)
    runs, parts = list[Run](), dict[int, tuple[int, int]]()
    for fetch in chosen.fetches:
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        blend = segment.kind == "chunk" and not is_exact(prompt, fetch)
        runs.append(Run(fetch.segment, lo, hi, segment.turn, blend))
        if segment.rows is not None:
            parts[fetch.segment] = segment.rows
    source = Parts(layers, parts) if runs else NoSource()
    return model.fuse(prompt.token_ids, prompt.positions, runs, source, chosen.policy, chosen.ratio, asked=prompt.asked)
