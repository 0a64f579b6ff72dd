"""Choose how each part of a stream is sent: as text to recompute, or at a level (CacheGen 5.3).

CacheGen sends each piece at the best level that meets the deadline at the last throughput, so a
link that becomes slower leaves no time for the rest. Here every part, which is a stored entry, is
first sent at its most lossy level, which takes little time. The lossiest parts are then read again
at better levels while time is left. If recomputing all parts meets the deadline, that is chosen, as
it is lossless. Arithmetic only: throughput and seconds are arguments, nothing here waits or reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from ragfuse.plan.cost import Blend, CostModel
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, LoadPlan, is_blended

AS_TEXT, AS_RAW = "text", "raw"
"""A part sent as text is recomputed; a part sent raw needs no decoding."""
COMPUTE_MARGIN = 1.15
"""Safety factor on predicted compute times."""
PATIENCE = 2.0
"""A part is first checked for lateness after this multiple of its predicted time."""
BACKOFF = 1.5
"""The next check for lateness comes after this multiple of the time already waited."""
MIN_THROUGHPUT = 1e-9
"""Used in place of a throughput of zero, in bytes per second."""
NEVER_LATE_S = 0.02
"""Seconds within which no part counts as late."""


@dataclass(frozen=True)
class StreamPart:
    """An entry to stream.

    Args:
        fetch: Its key and tier, and its bytes by codec level, least lossy first.
        segments: The segments of the prompt that use its rows. It is read once for all.
        tokens: The tokens of these segments.
        text_s: Seconds that recomputing them adds to the prefill; None: unknown, so it is never
            sent as text.
        decode_s: Seconds to decode it, by codec level.
    """

    fetch: Fetch
    segments: tuple[int, ...]
    tokens: int
    text_s: float | None = None
    decode_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes at each level, least lossy first."""
        return dict(self.fetch.sizes)

    def seconds(self, level: str, rank: int, throughput: float) -> tuple[float, float]:
        """Return the seconds to read and to decode the part.

        Args:
            level: The codec level. A part without it uses its own level of the same rank; a part
                without levels is recomputed.
            rank: The index of that level among the levels of the first part.
            throughput: Bytes per second.
        """
        levels = list(self.sizes)
        if not levels:
            return 0.0, self.text_s or 0.0
        own = level if level in levels else levels[min(rank, len(levels) - 1)]
        return self.sizes[own] / max(throughput, MIN_THROUGHPUT), self.decode_s.get(own, 0.0)


def first_level(
    remaining: Sequence[StreamPart],
    throughput: float | None,
    left_s: float,
    is_whole: bool = True,
) -> str:
    """Return the level of the first remaining part; better ones may follow.

    While nothing lossy was sent and recomputing all parts meets the deadline, they are recomputed,
    or read raw if that is faster. Otherwise the part is sent at its most lossy level; without
    levels it is recomputed.

    Args:
        remaining: All remaining parts.
        throughput: Bytes per second of the link for this stream; None: unknown.
        left_s: Seconds to the deadline, less the compute time that remains in any case.
        is_whole: True if nothing lossy was sent yet.

    Returns:
        `AS_TEXT`, `AS_RAW` or another codec level of the first part.
    """
    levels = list(remaining[0].sizes)
    text_s = _sum(part.text_s for part in remaining)
    if levels and not (is_whole and text_s is not None and COMPUTE_MARGIN * text_s <= left_s):
        return levels[-1]
    if AS_RAW not in levels or throughput is None or text_s is None:
        return AS_TEXT
    return AS_RAW if delay_s(remaining, AS_RAW, throughput) < text_s else AS_TEXT


def better_level(
    remaining: Sequence[StreamPart],
    better: Sequence[str],
    throughput: float,
    left_s: float,
) -> str:
    """Return a better level for the lossiest parts, which are then sent again; "" for none.

    Args:
        remaining: The lossiest parts.
        better: Less lossy levels of the first part, least lossy first. The first one at which all
            parts meet the deadline is chosen; otherwise the last, if the first part meets it.
        throughput: Bytes per second of the link for this stream.
        left_s: Seconds to the deadline.
    """
    in_time = (level for level in better if delay_s(remaining, level, throughput) <= left_s)
    level = next(in_time, better[-1])
    return level if delay_s(remaining[:1], level, throughput) <= left_s else ""


def delay_s(remaining: Sequence[StreamPart], level: str, throughput: float) -> float:
    """Return the seconds to read and decode all parts at one level, with both overlapped."""
    rank = list(remaining[0].sizes).index(level)
    read_s = done_s = 0.0
    for part in remaining:
        part_read_s, decode_s = part.seconds(level, rank, throughput)
        read_s += part_read_s
        done_s = max(done_s, read_s) + decode_s
    return done_s


def first_look_s(part: StreamPart, level: str, throughput: float | None) -> float | None:
    """Return the seconds until a part is checked for lateness; None: the tier has its timeout."""
    if throughput is None:
        return None if part.text_s is None else max(NEVER_LATE_S, part.text_s)
    return max(NEVER_LATE_S, PATIENCE * part.sizes[level] / max(throughput, MIN_THROUGHPUT))


def is_given_up(
    remaining: Sequence[StreamPart], level: str, waited_s: float, left_s: float
) -> bool:
    """Return whether to recompute the current, late part instead of waiting for it.

    A part that can still meet the deadline is waited for. The remaining wait is assumed to equal
    the past one, and the link to stay slow.

    Args:
        remaining: The current part and those after it.
        level: The codec level of the current part.
        waited_s: Seconds waited for it so far.
        left_s: Seconds to the deadline.
    """
    text_s, later = remaining[0].text_s, remaining[1:]
    if text_s is None:
        return False
    rest_s = _fastest_s(later, remaining[0].sizes[level] / max(2 * waited_s, MIN_THROUGHPUT))
    return waited_s + rest_s > left_s and text_s < waited_s


def _fastest_s(remaining: Sequence[StreamPart], throughput: float) -> float:
    if not remaining:
        return 0.0
    text_s = _sum(part.text_s for part in remaining)
    delays = (delay_s(remaining, level, throughput) for level in remaining[0].sizes)
    return min((*delays, inf if text_s is None else text_s))


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(seconds for seconds in known if seconds is not None)


def parts_of(plan: LoadPlan, fetches: Sequence[Fetch], costs: CostModel | None) -> list[StreamPart]:
    """Return one stream part per entry that these fetches read.

    Args:
        plan: The plan.
        fetches: Its fetches to stream.
        costs: Costs of computing on this machine; None: unknown.
    """
    prompt, blend, by_entry = plan.prompt, Blend.of(plan), dict[tuple[ChunkKey, str], list[Fetch]]()
    for fetch in fetches:
        by_entry.setdefault((fetch.key, fetch.tier), []).append(fetch)
    parts = list[StreamPart]()
    for same in by_entry.values():
        sizes = [len(prompt.segments[fetch.segment].tokens) for fetch in same]
        part = StreamPart(same[0], tuple(fetch.segment for fetch in same), sum(sizes))
        if costs is not None:
            as_text = replace(
                blend,
                forced=blend.forced + part.tokens,
                candidate_rows=blend.candidate_rows
                - sum(n for fetch, n in zip(same, sizes, strict=True) if is_blended(prompt, fetch)),
            )
            text_s = max(0.0, costs.fused_s(as_text) - costs.fused_s(blend))
            decode_s = {level: costs.decode_s(level, part.tokens) for level, _ in part.fetch.sizes}
            part = replace(part, text_s=text_s, decode_s=decode_s)
        parts.append(part)
    return parts
