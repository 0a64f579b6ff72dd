"""Plans in words for people, and as JSON. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from ragfuse.types.keys import Encoded, Kind
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import LoadPlan, is_blended, is_exact
from ragfuse.types.sizes import size_text

BOUNDS = MappingProxyType(
    {
        "floor": "the least that keeps answers close; loading hides no more",
        "loading": "as much as is computed in the time of loading",
        "deadline": "as much as the deadline leaves time for",
        "asked": "as asked for",
    }
)
"""What bounds a ratio, in words."""
RATIO_IS_FIXED = "what this policy always takes"
LEAST_RATIO_DESPITE_DEADLINE = (
    "the least that keeps answers close, although the deadline asks for less"
)
ENCODED: Mapping[Encoded, str] = MappingProxyType(
    {
        "alone": "encoded alone",
        "prefix": "encoded after the prompt's prefix",
        "filler": "encoded after filler text",
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
UNMEASURED = (
    "Times are not predicted: this machine was not measured with this model and these tiers"
    " (ragfuse measure)."
)


def in_words(plan: LoadPlan, unmeasured: str = UNMEASURED) -> str:
    """Return a plan in words: each reusable segment with its hit or miss, the ratio with its bound,
    the times.

    Args:
        plan: The plan.
        unmeasured: What is said instead of times on a machine that was not measured.
    """
    found, lines = plan.forecast, [f"{plan.explain()}."]
    for row in _rows(plan):
        if row["tier"] or row["why"]:
            lines.append(_line(plan, row))
    if plan.prompt.dropped:
        named = ", ".join(source or KIND_NAMES["chunk"] for source in plan.prompt.dropped)
        lines.append(f"Left out, so that the prompt and an answer fit: {named}.")
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
        f"First token after {found.ttft_s:.3f} s: {found.load_s:.3f} s of loading,"
        f" {found.recompute_s:.3f} s of computing{both}. Full prefill: {found.full_s:.3f} s."
    )
    for tier, times in found.corrections:
        factor = f"{times:.1f}" if times > 1 else f"{times:.2f}"
        lines.append(
            f"Reading {tier} is assumed to take {factor} times as long as measured, as it did for"
            " the last answers."
        )
    if found.is_late:
        lines.append(f"The deadline, {found.deadline_s:.3f} s from now, cannot be met.")
    return "\n".join(lines)


def as_dict(plan: LoadPlan) -> dict[str, Any]:
    """Return a plan in plain JSON types, with one row per reusable segment."""
    forecast = asdict(plan.forecast) if plan.forecast is not None else None
    if forecast is not None:
        del forecast["segments"]
    return {
        "policy": plan.policy,
        "ratio": plan.ratio,
        "fallback_reason": plan.fallback_reason,
        "tokens": len(plan.prompt),
        "segments": [
            {name: value for name, value in row.items() if name != "at"} for row in _rows(plan)
        ],
        "forecast": forecast,
    }


def _rows(plan: LoadPlan) -> Iterator[dict[str, Any]]:
    """Yield what the plan says of each reusable segment, which is the one at "at"."""
    fetches, misses = (
        {fetch.segment: fetch for fetch in (*plan.fetches, *plan.unread)},
        dict(plan.misses),
    )
    times = (
        {at: (load, compute) for at, load, compute in plan.forecast.segments}
        if plan.forecast
        else {}
    )
    for at, segment in enumerate(plan.prompt.segments):
        if segment.kind == "fresh":
            continue
        fetch, (load_s, compute_s) = fetches.get(at), times.get(at, (None, None))
        yield {
            "at": at,
            "source": segment.source,
            "kind": segment.kind,
            "n_tokens": len(segment.tokens),
            "hit": fetch in plan.fetches,
            "why": misses.get(at, ""),
            "tier": fetch.tier if fetch else "",
            "nbytes": fetch.nbytes if fetch else 0,
            "level": fetch.level if fetch else "",
            "encoded": fetch.key.encoded if fetch else "",
            "predicted_load_s": load_s,
            "predicted_compute_s": compute_s,
        }


def _line(plan: LoadPlan, row: Mapping[str, Any]) -> str:
    """Return a row in words: hit or miss, and how long it takes to load and to compute."""
    told = f"miss ({row['why']})" if row["why"] else "hit"
    if row["tier"]:
        level = "" if row["level"] == LEVEL_NAMES[0] else f" as {row['level']}"
        place = (
            f" in {row['tier']}{level}, {size_text(row['nbytes'])}"
            if row["nbytes"]
            else ", read above"
        )
        told += f"{place}, {ENCODED[row['encoded']]}"
    if row["predicted_load_s"] is not None:
        told += f"; {row['predicted_load_s']:.3f} s to load, " if row["tier"] else "; "
        read = next((fetch for fetch in plan.fetches if fetch.segment == row["at"]), None)
        if read is None:
            told += f"{row['predicted_compute_s']:.3f} s to compute"
        elif is_blended(plan.prompt, read):
            told += f"{row['predicted_compute_s']:.3f} s to recompute"
        else:
            exact = row["kind"] == "chunk" and is_exact(plan.prompt, read)
            told += f"{'exact here, so ' if exact else ''}nothing to recompute"
    return f"- {row['source'] or KIND_NAMES[row['kind']]}, {row['n_tokens']} tokens: {told}"
