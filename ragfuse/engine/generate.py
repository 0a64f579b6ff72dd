"""Stage 5, generate: decode the answer of a prefilled prompt, streaming it while it is generated.

Answers that are generated at the same time are decoded in one batch by `hf.decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragfuse.engine.answer_stream import StopSignal
from ragfuse.engine.constraints import OutputConstraints
from ragfuse.engine.options import options_of
from ragfuse.engine.request import PreparedPrompt, Request
from ragfuse.engine.trace_builder import trace_of
from ragfuse.hf.handover import generate
from ragfuse.hf.shared_kv import SharedKV, SharedSpan
from ragfuse.hf.stream import Follower
from ragfuse.telemetry.otel import span
from ragfuse.types.answer import Answer


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

    shared: SharedKV = field(default_factory=SharedKV)

    def share(self, prepared: PreparedPrompt, request: Request) -> None:
        """Share the KV of modules and prefixes in memory with other answers that are generated at the same time."""
        if not request.runtime.settings.share or not (request.has_company or request.model.batcher.active):
            return
        cache, wiring, plan = prepared.prefill.cache, request.model.shared_wiring, prepared.plan
        if cache is None or wiring is None or plan.fallback_reason or prepared.stream is not None:
            return
        spans = []
        for fetch in plan.fetches:
            segment, (lo, hi) = plan.prompt.segments[fetch.segment], plan.prompt.spans[fetch.segment]
            if segment.kind in ("module", "prefix"):
                spans.append(SharedSpan(lo, hi, (fetch.key, fetch.level, segment.rows, segment.shift)))
        self.shared.share(cache, sorted(spans, key=lambda span: span.lo), wiring.windows)

    def generate(self, prepared: PreparedPrompt, constraints: OutputConstraints, request: Request) -> Generated:
        """Generate and return the answer, streaming it to `request.say`; stop once one of `request.ends` is set."""
        ask, model = request.ask, request.model
        options = options_of(ask, request.runtime.settings, prepared.room)
        constraints = constraints.for_prompt(prepared.plan.prompt.token_ids, request.is_chat, options)
        draft = constraints.draft()
        follower = Follower(draft, request.say, request.ends)
        with span("decode"):
            ids = generate(model, prepared.prefill, constraints.generate_options(), [follower], ask.seed)
            follower.end()
        answer = constraints.read(draft, trace_of(prepared, request, follower.first_s))
        is_whole = not any(map(_is_abandoned, request.ends))
        return Generated(answer, ids, is_whole)


def _is_abandoned(end: object) -> bool:
    """Return whether an end event means that nobody reads the answer, rather than that it is long enough."""
    return end.is_abandoned if isinstance(end, StopSignal) else end.is_set()  # type: ignore[attr-defined]
