"""The trace of an answer, built from the plan of its prompt and its times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ragfuse.engine.background import jobs_after
from ragfuse.engine.request import PreparedPrompt
from ragfuse.schemas.bind import SchemaUse
from ragfuse.types.answer import SegmentTrace, Trace
from ragfuse.types.plan import LoadPlan, is_exact
from ragfuse.types.prompt import Segment
from ragfuse.types.reasons import CODE


def trace_of(ready: PreparedPrompt, first_s: float | None) -> Trace:
    """Return the trace of an answer that ends now.

    Args:
        ready: The prefilled prompt.
        first_s: `time.perf_counter()` at the answer's first token; None where it has none.
    """
    request, plan, prefill, now_s = ready.request, ready.plan, ready.prefill, time.perf_counter()
    began_s, prompt, forecast = request.began_s, plan.prompt, plan.forecast
    rows = tuple(prefill.chosen.tolist())
    segments = tuple(
        _segment(plan, index, rows)
        for index, segment in enumerate(prompt.segments)
        if segment.kind != "fresh" or segment.source == CODE
    )
    # a missed prefix is new text
    segments = tuple(each for each in segments if each.hit or each.kind != "prefix")
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
        corrections=forecast.corrections if forecast is not None else (),
        dropped=prompt.dropped,
        stream=ready.stream,
        session=prompt.conversation.id if prompt.conversation is not None else "",
        truncated=prompt.truncated,
        schema=use.schema if isinstance(use, SchemaUse) else "",
        modules=tuple(path for path, key in modules if key in read),
        tokens_prefix=hits["prefix"],
        tokens_chunks=hits["chunk"] - recomputed,
        tokens_to_encode=sum(len(job.tokens) for job in jobs_after(plan)),
    )


def _segment(plan: LoadPlan, index: int, rows: tuple[int, ...]) -> SegmentTrace:
    segment, (lo, hi) = plan.prompt.segments[index], plan.prompt.spans[index]
    n_tokens = hi - lo
    told = SegmentTrace(segment.source, segment.kind, n_tokens, segment.start, hit=False)
    if segment.source == CODE:
        return replace(told, source="", kind="chunk", why=CODE)
    fetch = next((fetch for fetch in plan.fetches if fetch.segment == index), None)
    told = replace(told, goes_on=_goes_on(plan.prompt.segments, index))
    if fetch is None or plan.fallback_reason:
        return replace(told, why=plan.fallback_reason or dict(plan.misses).get(index, ""))
    return replace(
        told,
        hit=True,
        tier=fetch.tier,
        level=fetch.level,
        # of these rows, which may be only some of the entry's
        nbytes=round(fetch.nbytes * n_tokens / max(n_tokens, fetch.n_tokens)),
        recomputed=sum(lo <= row < hi for row in rows),
        exact=is_exact(plan.prompt, fetch),
        encoded=fetch.key.encoded,
    )


def _goes_on(segments: Sequence[Segment], index: int) -> bool:
    """Return whether a segment is a later piece of the same chunk, or document, as the one with an
    entry before it.
    """
    segment = segments[index]
    before = next((each for each in reversed(segments[:index]) if each.keys), None)
    if before is None or segment.document == before.document >= 0:
        return before is not None
    if not segment.rows or not before.rows or segment.keys != before.keys:
        return False
    return segment.kind == before.kind == "chunk" and before.rows[0] < segment.rows[0]
