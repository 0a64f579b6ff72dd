"""From a prompt to its first logits: plan, read, fuse; once more without an entry that is lost on the way.

What is read and computed is told by the plan, which fusing obeys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ragfuse.asking import Ask, hurried
from ragfuse.bringing import Brought
from ragfuse.core import ChunkKey, LayerKV, LoadPlan, Prompt
from ragfuse.fitting import drops, room_of
from ragfuse.fuse.fusor import LostRun, Run, Source
from ragfuse.hf.model import HFModel, NoSource, Prefill
from ragfuse.load.layers import LayerReader
from ragfuse.plan.controller import is_exact
from ragfuse.planning import Planner
from ragfuse.profiles import ModelProfile
from ragfuse.settings import Settings
from ragfuse.store import KVStore
from ragfuse.telemetry import fused, loading, planned
from ragfuse.tracing import Ready, Timing


@dataclass(frozen=True)
class Prefiller:
    """Prefills an engine's prompts. `reads` hears of the keys that a prompt reads for itself."""

    settings: Settings
    store: KVStore
    planner: Planner
    reads: Callable[[Iterable[ChunkKey]], None]

    def prepare(
        self, prompt: Prompt, ask: Ask, model: HFModel, profile: ModelProfile, brought: Brought | None = None
    ) -> Ready:
        """The prefilled prompt; InputError if it is longer than the model can take.

        brought: what came for it over a line, and its plan.
        """
        room = room_of(prompt, model, drops(ask, self.settings))
        began, lost = time.perf_counter(), frozenset[int]()
        since = brought.began_s if brought is not None else began
        while True:
            if brought is not None and (brought.stream is not None or not lost):
                chosen = brought.plan
            else:
                left = hurried(ask, time.perf_counter() - since)
                chosen = planned(self.planner.plan)(prompt, left, model, profile, lost)
                self.reads(fetch.key for fetch in chosen.fetches)
            came = brought.streamed if brought is not None else frozenset[int]()
            near = replace(chosen, fetches=tuple(fetch for fetch in chosen.fetches if fetch.segment not in came))
            reader = LayerReader(self.store, near.fetches, model.n_layers, chosen.layers_a_read, model.device)
            try:
                with loading(reader, near):
                    prefill = _prefill(model, chosen, brought.over(reader) if brought is not None else reader)
            except LostRun as gone:
                lost |= {gone.segment}
                if brought is not None:
                    brought.lose(gone.segment)
                continue
            timing = _timing(since, began, reader, brought)
            if not came:
                self.planner.timings.saw(model, chosen, reader.load_s)
            self.planner.timings.computed(model, chosen, timing.compute_s)
            return Ready(
                chosen,
                prefill,
                timing,
                room,
                brought.trace() if brought is not None else None,
            )


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
def _prefill(model: HFModel, chosen: LoadPlan, layers: Source) -> Prefill:
    prompt = chosen.prompt
    if chosen.refusal:
        return model.full_prefill(prompt.token_ids)
    runs, parts = list[Run](), dict[int, tuple[int, int]]()
    for fetch in chosen.fetches:
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        blend = segment.kind == "chunk" and not is_exact(prompt, fetch)
        runs.append(Run(fetch.segment, lo, hi, segment.turn, blend))
        if segment.rows is not None:
            parts[fetch.segment] = segment.rows
    source = Parts(layers, parts) if runs else NoSource()
    return model.fuse(prompt.token_ids, prompt.positions, runs, source, chosen.policy, chosen.ratio, asked=prompt.asked)
