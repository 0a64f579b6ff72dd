"""The cost of streaming the segments of a plan: bytes at each level, and the time to recompute them instead.

Arithmetic over measurements, as far as there are any. `plan.stream_level` decides how each piece is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ragfuse.plan.controller import blend_of
from ragfuse.plan.estimate import Estimate
from ragfuse.plan.stream_level import StreamPart
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, LoadPlan, is_blended


def parts_of(
    plan: LoadPlan, fetches: Sequence[Fetch], estimate: Estimate | None, row_s: float | None = None
) -> list[StreamPart]:
    """Return a stream part for each entry that these fetches of a plan read.

    Args:
        plan: The plan.
        fetches: Its fetches to stream.
        estimate: The estimate for this machine; None: not measured.
        row_s: Seconds to compute a row, used where the machine was not measured; None: unknown.
    """
    parts: dict[tuple[ChunkKey, str], StreamPart] = {}
    for fetch in fetches:
        n = len(plan.prompt.segments[fetch.segment].tokens)
        sizes = dict(fetch.sizes) or {fetch.level: fetch.nbytes}
        decode = {} if estimate is None else {level: n * estimate.machine.decode.get(level, 0.0) for level in sizes}
        part, entry = (
            StreamPart(fetch.segment, n, sizes, text_s(plan, fetch, estimate, row_s), decode),
            (fetch.key, fetch.tier),
        )
        parts[entry] = parts[entry].and_for(part) if entry in parts else part
    return list(parts.values())


def text_s(plan: LoadPlan, fetch: Fetch, estimate: Estimate | None, row_s: float | None = None) -> float | None:
    """Return the seconds that recomputing one of its fetches adds to a plan; None: unknown."""
    blend, n = blend_of(plan), len(plan.prompt.segments[fetch.segment].tokens)
    candidate_rows = n if is_blended(plan.prompt, fetch) else 0
    if estimate is None:
        return None if row_s is None else row_s * (n - blend.ratio * candidate_rows)
    recomputed = replace(blend, forced=blend.forced + n, candidate_rows=blend.candidate_rows - candidate_rows)
    return max(0.0, estimate.fused_s(recomputed) - estimate.fused_s(blend))


def base_s(plan: LoadPlan, estimate: Estimate | None, row_s: float | None = None) -> float:
    """Return the compute seconds of a plan once all its fetches are loaded; 0 where unknown."""
    blend = blend_of(plan)
    if estimate is None:
        return (row_s or 0.0) * (blend.forced + blend.ratio * blend.candidate_rows)
    return estimate.fused_s(blend)


def prior(fetches: Sequence[Fetch], estimate: Estimate | None) -> float | None:
    """Return the measured bytes per second of the first fetch's tier; None where it was not measured."""
    speed = estimate.machine.tiers.get(fetches[0].tier) if estimate is not None and fetches else None
    return 1 / speed.byte_s if speed is not None and speed.byte_s > 0 else None
