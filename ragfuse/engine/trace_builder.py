"""The trace of an answer, built from the plan of its prompt and its times."""

from __future__ import annotations

import time
from collections import Counter

from ragfuse.engine.remember import missed
from ragfuse.engine.request import PreparedPrompt
from ragfuse.plan.explanation import segment_traces
from ragfuse.schemas.bind import SchemaUse
from ragfuse.types.answer import SegmentTrace, Trace
from ragfuse.types.choices import LEVEL_NAMES


def trace_of(ready: PreparedPrompt, first_s: float | None) -> Trace:
    """Return the trace of an answer that ends now.

    Args:
        ready: The prefilled prompt.
        first_s: `time.perf_counter()` at the answer's first token; None where it has none.
    """
    request, plan, prefill, now_s = ready.request, ready.plan, ready.prefill, time.perf_counter()
    began_s, prompt, forecast = request.began_s, plan.prompt, plan.forecast
    rows = tuple(prefill.chosen.tolist())
    segments = tuple(segment_traces(plan, rows))
    if prefill.n_before:
        known = SegmentTrace(
            "",
            "prefix",
            prefill.n_before,
            0,
            True,
            "memory",
            LEVEL_NAMES[0],
            exact=True,
            encoded="alone",
        )
        segments = (
            known,
            *(each for each in segments if each.start + each.n_tokens > prefill.n_before),
        )
    hits = Counter[str]()
    for each in segments:
        hits[each.kind] += each.n_tokens if each.hit else 0
    cached = hits.total()
    blended = (s.n_tokens for s in segments if s.hit and s.kind == "chunk" and not s.exact)
    recomputed = round(prefill.mean_ratio * sum(blended))
    use, read = prompt.schema_use, {fetch.key for fetch in plan.fetches}
    modules = use.modules if isinstance(use, SchemaUse) else ()
    return Trace(
        model=request.model.name,
        policy=plan.policy,
        ratio=plan.ratio,
        tokens=len(prompt),
        tokens_reused=cached - recomputed,
        tokens_recomputed=recomputed,
        tokens_fresh=len(prompt) - cached,
        mean_ratio=prefill.mean_ratio,
        nbytes=sum(s.nbytes for s in segments),
        load_s=ready.load_s,
        compute_s=ready.compute_s,
        prefill_s=ready.wait_s + ready.compute_s,
        ttft_s=(first_s or now_s) - began_s,
        deadline_s=request.ask.deadline_s,
        total_s=now_s - began_s,
        fallback_reason=plan.fallback_reason,
        segments=segments,
        recomputed_rows=rows,
        predicted_ttft_s=forecast.ttft_s if forecast is not None else None,
        predicted_load_s=forecast.load_s if forecast is not None else None,
        dropped=prompt.dropped,
        stream=ready.stream,
        session=prompt.conversation.id if prompt.conversation is not None else "",
        truncated=prompt.truncated,
        schema=use.schema if isinstance(use, SchemaUse) else "",
        modules=tuple(path for path, key in modules if key in read),
        tokens_prefix=hits["prefix"],
        tokens_chunks=hits["chunk"] - recomputed,
        tokens_to_encode=sum(len(each.tokens) for each in missed(plan)),
    )
