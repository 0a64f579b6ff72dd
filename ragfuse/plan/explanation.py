"""Load plans as text, as JSON, and as traces of segments. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from ragfuse.types.answer import SegmentTrace
from ragfuse.types.choices import LEVEL_NAMES
from ragfuse.types.keys import Kind
from ragfuse.types.plan import CODE, LoadPlan, is_exact
from ragfuse.types.prompt import Segment
from ragfuse.types.sizes import size_text

BOUNDS = MappingProxyType(
    {
        "floor": "the minimum for close answers; loading takes too little time to hide more",
        "loading": "as much as can be computed while KV is loaded",
        "deadline": "as much as the deadline allows",
        "asked": "as requested",
    }
)
"""Text for each limit (`Bound`) that can set the recompute ratio."""
RATIO_IS_FIXED = "fixed by this policy"
LEAST_RATIO_DESPITE_DEADLINE = "the minimum for close answers; the deadline needs a lower ratio"
ENCODED: Mapping[str, str] = MappingProxyType(
    {
        "alone": "encoded alone",
        "prefix": "encoded after the prompt's prefix",
        "filler": "encoded after filler text",
    }
)
KIND_NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        "prefix": "the prefix",
        "module": "a module",
        "history": "earlier turns",
        "chunk": "a chunk",
        "fresh": "new text",
    }
)
UNMEASURED = "Times are not predicted: run `ragfuse measure` for this model and these tiers."


def in_words(plan: LoadPlan, unmeasured: str = UNMEASURED) -> str:
    """Return a load plan as text: hits and misses, the ratio and its reason, and predicted times.

    Args:
        plan: The load plan.
        unmeasured: Text that replaces the predicted times on an unmeasured machine.
    """
    found = plan.forecast
    lines = [f"{plan.explain()}.", *map(_line, segment_traces(plan))]
    if found is not None and plan.chooses:
        quantity, bound = f"Ratio {plan.ratio:.2f}", BOUNDS[found.bound]
        if not plan.cost.is_adjustable:
            quantity, bound = "Rows", RATIO_IS_FIXED
        elif found.bound == "deadline" and found.is_late:
            bound = LEAST_RATIO_DESPITE_DEADLINE
        lines.append(f"{quantity} by {plan.policy}: {bound}.")
    if found is None:
        return "\n".join((*lines, unmeasured))
    both = (
        ", partly at the same time"
        if found.ttft_s < 0.999 * (found.load_s + found.recompute_s)
        else ""
    )
    lines.append(
        f"Predicted TTFT {found.ttft_s:.3f} s: {found.load_s:.3f} s of loading,"
        f" {found.recompute_s:.3f} s of computing{both}. Full prefill: {found.full_s:.3f} s."
    )
    if found.is_late:
        lines.append(f"The deadline, {found.deadline_s:.3f} s from now, cannot be met.")
    return "\n".join(lines)


def as_dict(plan: LoadPlan) -> dict[str, Any]:
    """Return a load plan as plain JSON types, with the trace of each reusable segment."""
    return {
        "policy": plan.policy,
        "ratio": plan.ratio,
        "fallback_reason": plan.fallback_reason,
        "tokens": len(plan.prompt),
        "segments": [asdict(each) for each in segment_traces(plan)],
        "forecast": plan.forecast and asdict(plan.forecast),
    }


def segment_traces(plan: LoadPlan, rows: Sequence[int] = ()) -> list[SegmentTrace]:
    """Return the trace of each segment that could come from the store.

    Args:
        plan: The load plan.
        rows: Rows of the prompt that were recomputed. Empty before the prefill.
    """
    prompt, misses, found = plan.prompt, dict(plan.misses), list[SegmentTrace]()
    fetches, before = {fetch.segment: fetch for fetch in plan.fetches}, None
    for at, (segment, (lo, hi)) in enumerate(zip(prompt.segments, prompt.spans, strict=True)):
        told = SegmentTrace(segment.source, segment.kind, hi - lo, segment.start, hit=False)
        if segment.source == CODE:
            found.append(replace(told, source="", kind="chunk", why=CODE))
        elif (fetch := fetches.get(at)) is not None:
            told = replace(
                told,
                hit=True,
                tier=fetch.tier,
                level=fetch.level,
                # bytes of this segment's rows; the entry may have more rows
                nbytes=round(fetch.nbytes * (hi - lo) / max(hi - lo, fetch.n_tokens)),
                recomputed=sum(lo <= row < hi for row in rows),
                exact=is_exact(prompt, fetch),
                encoded=fetch.key.encoded,
                goes_on=_goes_on(before, segment),
            )
            found.append(told)
        elif segment.kind not in ("fresh", "prefix"):  # a missed prefix counts as new text
            why = misses.get(at) or plan.fallback_reason
            found.append(replace(told, why=why, goes_on=_goes_on(before, segment)))
        before = segment if segment.keys else before
    return found


def _goes_on(before: Segment | None, segment: Segment) -> bool:
    """Return whether a segment continues the chunk or document of the earlier segment `before`."""
    if before is None or segment.document == before.document >= 0:
        return before is not None
    if not segment.rows or not before.rows or segment.keys != before.keys:
        return False
    return segment.kind == before.kind == "chunk" and before.rows[0] < segment.rows[0]


def _line(each: SegmentTrace) -> str:
    told = f"miss ({each.why})"
    if each.hit:
        level = "" if each.level == LEVEL_NAMES[0] else f" as {each.level}"
        size = (
            f" in {each.tier}{level}, {size_text(each.nbytes)}" if each.nbytes else ", read above"
        )
        told = f"hit{size}, {ENCODED[each.encoded]}"
        told += ", exact here" if each.kind == "chunk" and each.exact else ""
    return f"- {each.source or KIND_NAMES[each.kind]}, {each.n_tokens} tokens: {told}"
