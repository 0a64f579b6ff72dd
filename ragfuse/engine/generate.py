"""Stage 5, generate: decode the answer of a prefilled prompt, streaming it while it is generated.

Answers that are generated at the same time are decoded in one batch by `hf.decode`.
"""

from __future__ import annotations

from ragfuse.engine.draft import Draft
from ragfuse.engine.request import PreparedPrompt
from ragfuse.engine.trace_builder import trace_of
from ragfuse.hf.cache import SharedSpan
from ragfuse.hf.handover import Follower, generate
from ragfuse.telemetry.otel import span
from ragfuse.types.answer import Answer


def share(prepared: PreparedPrompt) -> None:
    """Share the KV of modules and prefixes in memory with other answers that are generated at the
    same time.
    """
    request, cache, plan = prepared.request, prepared.prefill.cache, prepared.plan
    runtime, wiring = request.runtime, request.model.shared_wiring
    if not runtime.settings.share or not (request.has_company or request.model.batcher.active):
        return
    if cache is None or wiring is None or plan.fallback_reason or prepared.stream is not None:
        return
    spans = []
    for fetch in plan.fetches:
        segment, (lo, hi) = plan.prompt.segments[fetch.segment], plan.prompt.spans[fetch.segment]
        if segment.kind in ("module", "prefix"):
            spans.append(SharedSpan(lo, hi, (fetch.key, fetch.level, segment.rows, segment.shift)))
    runtime.shared_kv.share(cache, sorted(spans, key=lambda span: span.lo), wiring.windows)


def generated(prepared: PreparedPrompt, draft: Draft) -> tuple[Answer, list[int]]:
    """Generate and return the answer, and the ids as generated, streaming it to `request.say`; stop
    once one of `request.ends` is set.
    """
    request = prepared.request
    follower = Follower(draft, request.say, request.ends)
    with span("decode"):
        ids = generate(request.model, prepared.prefill, draft.options, [follower], request.ask.seed)
        follower.end()
    return draft.answer(trace_of(prepared, follower.first_s)), ids
