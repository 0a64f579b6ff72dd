"""A plan told to people. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from ragfuse.core import LoadPlan

BOUNDS = MappingProxyType(
    {
        "floor": "the least that keeps answers close, and loading hides no more",
        "loading": "as much as is computed in the time of loading",
        "deadline": "as much as the deadline leaves time for",
        "asked": "as asked for",
    }
)
"""What a ratio stopped at, in words."""
UNMEASURED = "Times are not predicted: this model, machine and store were not measured (ragfuse measure)."


def in_words(plan: LoadPlan) -> str:
    """Every segment that could be reused, hit or miss and why; the ratio and why not more; the time it will take."""
    return "\n".join((f"{plan.explain()}.", *_segments(plan), *_expected(plan)))


def _segments(plan: LoadPlan) -> Iterator[str]:
    """A line for each segment that the plan says something of."""
    kept, misses = {fetch.segment: fetch for fetch in (*plan.fetches, *plan.unread)}, dict(plan.misses)
    times = {at: (load, compute) for at, load, compute in plan.forecast.segments} if plan.forecast else {}
    for index, segment in enumerate(plan.prompt.segments):
        if index not in kept and index not in misses:
            continue
        fetch, (load_s, compute_s) = kept.get(index), times.get(index, (0.0, 0.0))
        said = f"miss ({misses[index]})" if index in misses else "hit"
        said += f" in {fetch.tier}, {fetch.nbytes / 1e6:.1f} MB" if fetch is not None else ""
        if index in times:
            said += f"; {load_s:.3f} s to load" if fetch is not None else ""
            said += f"{',' if fetch is not None else ';'} {compute_s:.3f} s to {_doing(index in misses)}"
        yield f"- {segment.source or segment.kind}, {len(segment.tokens)} tokens: {said}"


def _doing(missing: bool) -> str:
    return "compute" if missing else "recompute"


def _expected(plan: LoadPlan) -> Iterator[str]:
    """The ratio and the times, a line each."""
    found = plan.forecast
    if found is None:
        yield UNMEASURED
        return
    if not plan.refusal:
        yield f"Ratio {plan.ratio:.2f} by {plan.policy}: {BOUNDS[found.bound]}."
    yield (
        f"First token after {found.ttft_s:.3f} s: {found.load_s:.3f} s of loading, {found.recompute_s:.3f} s of "
        f"computing. Full prefill: {found.full_s:.3f} s."
    )
    for tier, times in found.corrections:
        said = f"{times:.1f} times as long" if times > 1 else f"{times:.2f} of the time"
        yield f"Reading {tier} is counted as {said} that was measured: so it was in the last answers."
    if found.is_late:
        yield f"The deadline of {found.deadline_s:.3f} s cannot be met."
