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


def parts_of(plan: LoadPlan, fetches: Sequence[Fetch], estimate: Estimate | None) -> list[StreamPart]:
    """Return a stream part for each entry that these fetches of a plan read.

    Args:
        plan: The plan.
        fetches: Its fetches to stream.
        estimate: The estimate for this machine; None: nothing is known.
    """
    parts, blend = dict[tuple[ChunkKey, str], StreamPart](), blend_of(plan)
    for fetch in fetches:
        n = len(plan.prompt.segments[fetch.segment].tokens)
        part = StreamPart(fetch.segment, n, dict(fetch.sizes))
        if estimate is not None:
            candidates = n if is_blended(plan.prompt, fetch) else 0
            as_text = replace(blend, forced=blend.forced + n, candidate_rows=blend.candidate_rows - candidates)
            text_s = estimate.rows_s(as_text, -candidates, n)
            part = replace(part, text_s=text_s, decode_s={level: estimate.decode_s(level, n) for level in part.sizes})
        entry = fetch.key, fetch.tier
        parts[entry] = parts[entry].and_for(part) if entry in parts else part
    return list(parts.values())
