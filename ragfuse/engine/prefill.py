"""Stage 4, prefill: compute the first logits of a prompt from its loaded layers; again if an entry is unreadable."""

from __future__ import annotations

from dataclasses import dataclass

from ragfuse.engine.fetch import FetchedKV, SlicedSource
from ragfuse.engine.machine_timings import MachineTimings
from ragfuse.engine.overflow import drops, room_of
from ragfuse.engine.prefix_cache import PrefixCache
from ragfuse.engine.trace_builder import PreparedPrompt
from ragfuse.fuse.fusor import CachedRun, LayerSource, LostRun
from ragfuse.hf.kept_states import TenantStates
from ragfuse.hf.model import HFModel, NoSource, Prefill
from ragfuse.settings import Settings
from ragfuse.telemetry.otel import fused
from ragfuse.types.plan import LoadPlan, is_exact


@dataclass(frozen=True)
class PrefillStage:
    """Prefills the prompts of an engine, and records how long that took."""

    settings: Settings
    timings: MachineTimings
    prefixes: PrefixCache

    def prefill(self, fetched: FetchedKV) -> PreparedPrompt:
        """Return the prefilled prompt.

        Raises:
            OverlongError: The prompt does not fit the model's context.
        """
        request = fetched.plan.request
        model, ask = request.model, request.ask
        room = room_of(fetched.plan.prompt, model, drops(ask, self.settings))
        while True:
            chosen = fetched.chosen()
            try:
                with fetched.layers(chosen) as (reader, layers):
                    states = self.prefixes.kept_states() if ask.reuse and model.profile.state else None
                    prefill = _prefill(model, chosen, layers, states)
            except LostRun as lost:
                fetched.lose(lost.segment, chosen)
                continue
            timing = fetched.timing(reader)
            if not fetched.streamed_segments:
                self.timings.note_load(model, chosen, reader.load_s)
            if not model.profile.state:
                self.timings.note_compute(model, chosen, timing.compute_s)
            trace = fetched.streamed.trace() if fetched.streamed is not None else None
            return PreparedPrompt(chosen, prefill, timing, room, trace)


@fused
def _prefill(model: HFModel, chosen: LoadPlan, layers: LayerSource, states: TenantStates | None) -> Prefill:
    """Compute what the plan does not load: the whole prompt, the tokens after a kept state, or the selected rows."""
    prompt = chosen.prompt
    if chosen.fallback_reason and model.profile.state and prompt.schema_use is None:
        return model.prefill_state(prompt.token_ids, states)
    if chosen.fallback_reason:
        return model.full_prefill(prompt.token_ids, prompt.positions)
    runs, parts = list[CachedRun](), dict[int, tuple[int, int]]()
    for fetch in chosen.fetches:
        segment, (lo, hi) = prompt.segments[fetch.segment], prompt.spans[fetch.segment]
        blend = segment.kind == "chunk" and not is_exact(prompt, fetch)
        runs.append(CachedRun(fetch.segment, lo, hi, segment.shift, blend))
        if segment.rows is not None:
            parts[fetch.segment] = segment.rows
    source = SlicedSource(layers, parts) if runs else NoSource()
    ids, positions, asked = prompt.token_ids, prompt.positions, prompt.question_rows
    return model.fuse(ids, positions, runs, source, chosen.policy, chosen.ratio, question_rows=asked)
