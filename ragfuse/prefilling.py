"""From a prompt to its first logits: plan, read, fuse; once more without an entry that is lost on the way.

What is read and computed is told by the plan, which fusing obeys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ragfuse.asking import Ask, hurried
from ragfuse.core import ChunkKey, LoadPlan, Prompt
from ragfuse.fitting import drops, room_of
from ragfuse.fuse.fusor import LostRun, Run
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

    def prepare(self, prompt: Prompt, ask: Ask, model: HFModel, profile: ModelProfile) -> Ready:
        """The prefilled prompt; InputError if it is longer than the model can take."""
        began, lost = time.perf_counter(), frozenset[int]()
        room = room_of(prompt, model, drops(ask, self.settings))
        while True:
            left = hurried(ask, time.perf_counter() - began)
            chosen = planned(self.planner.plan)(prompt, left, model, profile, lost)
            self.reads(fetch.key for fetch in chosen.fetches)
            reader = LayerReader(self.store, chosen.fetches, model.n_layers, chosen.layers_a_read, model.device)
            try:
                with loading(reader, chosen):
                    prefill = _prefill(model, chosen, reader)
            except LostRun as gone:
                lost |= {gone.segment}
                continue
            compute_s = time.perf_counter() - began - reader.wait_s
            self.planner.timings.saw(model, chosen, reader.load_s)
            return Ready(chosen, prefill, Timing(began, reader.load_s, reader.wait_s, compute_s), room)


@fused
def _prefill(model: HFModel, chosen: LoadPlan, reader: LayerReader) -> Prefill:
    prompt = chosen.prompt
    if chosen.refusal:
        return model.full_prefill(prompt.token_ids)
    runs = []
    for fetch in chosen.fetches:
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        blend = segment.kind == "chunk" and not is_exact(prompt, fetch)
        runs.append(Run(fetch.segment, lo, hi, segment.start, blend))
    source = reader if runs else NoSource()
    return model.fuse(prompt.token_ids, prompt.positions, runs, source, chosen.policy, chosen.ratio, asked=prompt.asked)
