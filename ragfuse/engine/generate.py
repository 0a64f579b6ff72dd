"""Stage 5, generate: decode the answer of a prefilled prompt, streaming it while it is generated.

Answers that are generated at the same time are decoded in one batch by `hf.decode`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ragfuse.engine.answer_stream import StopSignal
from ragfuse.engine.constraints import OutputConstraints
from ragfuse.engine.options import is_streamable, options_of
from ragfuse.engine.request import Request
from ragfuse.engine.trace_builder import PreparedPrompt, trace_of
from ragfuse.hf.handover import generate
from ragfuse.hf.model import HFModel
from ragfuse.hf.shared_kv import SharedKV, SharedSpan
from ragfuse.hf.stream import StopWhen
from ragfuse.settings import Settings
from ragfuse.telemetry.otel import span
from ragfuse.types.answer import Answer, Thought, Trace


@dataclass(frozen=True)
class Generated:
    """A generated answer.

    Args:
        answer: The answer.
        token_ids: The ids as generated.
        is_whole: Whether it was not abandoned by its reader, so that it becomes part of its conversation.
    """

    answer: Answer
    token_ids: Sequence[int]
    is_whole: bool


@dataclass(frozen=True)
class GenerateStage:
    """Generates the answers of an engine."""

    settings: Settings
    shared: SharedKV = field(default_factory=SharedKV)

    def share(self, prepared: PreparedPrompt, request: Request) -> None:
        """Share the KV of modules and prefixes in memory with other answers that are generated at the same time."""
        if self.settings.share and (request.has_company or request.model.batcher.active):
            self._share(prepared, request.model)

    def generate(self, prepared: PreparedPrompt, request: Request) -> Generated:
        """Generate and return the answer, streaming it to `request.say`; stop once one of `request.ends` is set."""
        ask, model, say = request.ask, request.model, request.say
        constraints = request.constraints or OutputConstraints(ask, model)
        constraints = constraints.for_prompt(prepared.plan.prompt.token_ids, request.is_chat)
        options = options_of(ask, self.settings, prepared.room)
        sink = constraints.sink(say, options)
        streamer = sink if is_streamable(options, model) else None
        with span("decode"):
            full = constraints.options(dict(options))
            stopping = [*map(StopWhen, request.ends), *constraints.stopping(options)]
            ids = generate(model, prepared.prefill, full, streamer, stopping, ask.seed)[0]
        trace = self._trace(prepared, request, sink.first_s)
        answer = constraints.read(ids, options, trace)
        is_whole = not any(map(_is_abandoned, request.ends))
        if streamer is None and say is not None:
            if answer.reasoning:
                say(Thought(answer.reasoning))
            say(answer.text)
        return Generated(answer, ids, is_whole)

    def _share(self, prepared: PreparedPrompt, model: HFModel) -> None:
        cache, wiring, plan = prepared.prefill.cache, model.shared_wiring, prepared.plan
        if cache is None or wiring is None or plan.fallback_reason or prepared.stream is not None:
            return
        spans = []
        for fetch in plan.fetches:
            segment, (lo, hi) = plan.prompt.segments[fetch.segment], plan.prompt.spans[fetch.segment]
            if segment.kind in ("module", "prefix"):
                spans.append(SharedSpan(lo, hi, (fetch.key, fetch.level, segment.rows, segment.shift)))
        self.shared.share(cache, sorted(spans, key=lambda span: span.lo), wiring.windows)

    def _trace(self, prepared: PreparedPrompt, request: Request, first_s: float | None) -> Trace:
        timing = replace(prepared.timing, began_s=request.runtime.without_loading(request.began_s))
        trace = trace_of(prepared, timing, first_s, time.perf_counter(), request.model.name)
        return replace(trace, deadline_s=request.ask.deadline_s)


def _is_abandoned(end: object) -> bool:
    """Return whether an end event means that nobody reads the answer, rather than that it is long enough."""
    return end.is_abandoned if isinstance(end, StopSignal) else end.is_set()  # type: ignore[attr-defined]
