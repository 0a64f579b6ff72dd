"""Plans in words for people, and as JSON. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ragfuse.types.keys import Encoded, Kind
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import Fetch, Forecast, LoadPlan, is_blended, is_exact
from ragfuse.types.policy_cost import Needs
from ragfuse.types.sizes import size_text

BOUNDS = MappingProxyType(
    {
        "floor": "the least that keeps answers close; more would take time that loading does not hide",
        "loading": "as much as is computed in the time of loading",
        "deadline": "as much as the deadline leaves time for",
        "asked": "as asked for",
    }
)
"""What bounds a ratio, in words."""
RATIO_IS_FIXED = "what this policy always takes"
LEAST_RATIO_DESPITE_DEADLINE = "the least that keeps answers close, although the deadline asks for less"
NEEDS: Mapping[Needs, str] = MappingProxyType(
    {
        "nothing": "layer by layer: each is computed once it is read, while the next ones are read",
        "all rows of a layer": "layer by layer: the first is computed whole, which shows which tokens differ most; the "
        "others are computed as they are read",
        "attention": "three quarters of the layers are read first: the question's attention to them shows which tokens "
        "to recompute, so nothing is computed before",
    }
)
"""What a policy needs before it can choose its rows, in words."""
ENCODED: Mapping[Encoded, str] = MappingProxyType(
    {
        "alone": "encoded alone",
        "prefix": "encoded behind the prompt's beginning",
        "filler": "encoded behind filler text",
    }
)
KIND_NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        "prefix": "the prompt's beginning",
        "module": "a module",
        "history": "earlier turns",
        "chunk": "a chunk",
        "fresh": "new text",
    }
)
UNMEASURED = "Times are not predicted: this machine was not measured with this model and these tiers (ragfuse measure)."


def in_words(plan: LoadPlan, unmeasured: str = UNMEASURED, name_of: Callable[[str], str] = str) -> str:
    """Return a plan in words: each reusable segment with its hit or miss, the ratio with its bound, the times.

    Args:
        plan: The plan.
        unmeasured: What is said instead of times on a machine that was not measured.
        name_of: Gives the name of a source.
    """
    parts = _segments(plan, name_of), _left_out(plan, name_of), _chosen(plan), _expected(plan, unmeasured)
    return "\n".join((f"{plan.explain()}.", *(line for part in parts for line in part)))


def as_dict(plan: LoadPlan) -> dict[str, Any]:
    """Return a plan in plain JSON types, with one row per reusable segment."""
    fetches, misses = {fetch.segment: fetch for fetch in (*plan.fetches, *plan.unread)}, _misses(plan)
    times = {at: (load, compute) for at, load, compute in plan.forecast.segments} if plan.forecast else {}
    rows = []
    for at, segment in enumerate(plan.prompt.segments):
        if not segment.is_new_text:
            fetch, (load_s, compute_s) = fetches.get(at), times.get(at, (None, None))
            row: dict[str, Any] = {
                "source": segment.source,
                "kind": segment.told_kind,
                "n_tokens": len(segment.tokens),
            }
            row |= {"hit": any(f.segment == at for f in plan.fetches), "why": misses.get(at, "")}
            row |= {"tier": fetch.tier if fetch else "", "nbytes": fetch.nbytes if fetch else 0}
            row |= {"level": fetch.level if fetch else "", "encoded": fetch.key.encoded if fetch else ""}
            rows.append({**row, "predicted_load_s": load_s, "predicted_compute_s": compute_s})
    forecast = asdict(plan.forecast) if plan.forecast is not None else None
    if forecast is not None:
        del forecast["segments"]
    return {
        "policy": plan.policy,
        "needs": needs(plan),
        "ratio": plan.ratio,
        "fallback_reason": plan.fallback_reason,
        "tokens": len(plan.prompt),
        "segments": rows,
        "forecast": forecast,
    }


def needs(plan: LoadPlan) -> str:
    """Return what the plan's policy needs first, in words; "" where it has nothing to choose."""
    return NEEDS[plan.cost.needs] if plan.chooses else ""


def _segments(plan: LoadPlan, name_of: Callable[[str], str]) -> Iterator[str]:
    """Yield a line for each hit or miss."""
    fetches, misses = {fetch.segment: fetch for fetch in (*plan.fetches, *plan.unread)}, _misses(plan)
    times = {at: (load, compute) for at, load, compute in plan.forecast.segments} if plan.forecast else {}
    for index, segment in enumerate(plan.prompt.segments):
        if index not in fetches and index not in misses:
            continue
        fetch, notes = fetches.get(index), [f"miss ({misses[index]})" if index in misses else "hit"]
        if fetch is not None:
            level = "" if fetch.level == LEVEL_NAMES[0] else f" as {fetch.level}"
            place = f" in {fetch.tier}{level}, {size_text(fetch.nbytes)}" if fetch.nbytes else ", read above"
            notes[0] += f"{place}, {ENCODED[fetch.key.encoded]}"
        if index in times:
            notes.append(_seconds(plan, None if index in misses else fetch, fetch is not None, *times[index]))
        name = name_of(segment.source) or KIND_NAMES[segment.kind]
        yield f"- {name}, {len(segment.tokens)} tokens: {'; '.join(notes)}"


def _misses(plan: LoadPlan) -> dict[int, str]:
    """Return why a segment is computed, by its index: its miss, or that it is a chunk too short to be stored."""
    told = ((at, each) for at, each in enumerate(plan.prompt.segments) if not (each.keys or each.is_new_text))
    return {**{at: each.why_fresh for at, each in told}, **dict(plan.misses)}


def _left_out(plan: LoadPlan, name_of: Callable[[str], str]) -> Iterator[str]:
    """Yield a line with the chunks that were left out of a prompt that was too long."""
    if plan.prompt.dropped:
        named = ", ".join(name_of(source) or KIND_NAMES["chunk"] for source in plan.prompt.dropped)
        yield f"Left out, so that the prompt and an answer fit: {named}."


def _seconds(plan: LoadPlan, read: Fetch | None, there: bool, load_s: float, compute_s: float) -> str:
    """Return how long a segment takes to load (where it is stored) and to compute (where that is needed)."""
    loading = f"{load_s:.3f} s to load, " if there else ""
    if read is None:
        return f"{loading}{compute_s:.3f} s to compute"
    if is_blended(plan.prompt, read):
        return f"{loading}{compute_s:.3f} s to recompute"
    exact = plan.prompt.segments[read.segment].kind == "chunk" and is_exact(plan.prompt, read)
    return f"{loading}{'exact here, so ' if exact else ''}nothing to recompute"


def _chosen(plan: LoadPlan) -> Iterator[str]:
    """Yield the ratio with its bound, and what the policy needs first; nothing where it has nothing to choose."""
    if plan.fallback_reason or not plan.chooses:
        return
    if plan.forecast is not None:
        quantity = f"Ratio {plan.ratio:.2f}" if plan.cost.is_adjustable else "Rows"
        yield f"{quantity} by {plan.policy}: {_bound(plan, plan.forecast)}."
    if needed := needs(plan):
        yield f"How {plan.policy} goes: {needed}."


def _bound(plan: LoadPlan, found: Forecast) -> str:
    if not plan.cost.is_adjustable:
        return RATIO_IS_FIXED
    return LEAST_RATIO_DESPITE_DEADLINE if found.bound == "deadline" and found.is_late else BOUNDS[found.bound]


def _expected(plan: LoadPlan, unmeasured: str) -> Iterator[str]:
    """Yield the predicted times, one line each."""
    found = plan.forecast
    if found is None:
        yield unmeasured
        return
    both = ", partly at the same time" if found.ttft_s < 0.999 * (found.load_s + found.recompute_s) else ""
    yield (
        f"First token after {found.ttft_s:.3f} s: {found.load_s:.3f} s of loading, {found.recompute_s:.3f} s of "
        f"computing{both}. Full prefill: {found.full_s:.3f} s."
    )
    for tier, times in found.corrections:
        factor = f"{times:.1f}" if times > 1 else f"{times:.2f}"
        yield f"Reading {tier} is assumed to take {factor} times as long as measured, as it did for the last answers."
    if found.is_late:
        yield f"The deadline of {found.deadline_s:.3f} s cannot be met."
