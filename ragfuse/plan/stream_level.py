"""Choose how each part of a stream is sent: as text or at a codec level (CacheGen 5.3).

CacheGen sends each part at the best level that meets the deadline at the throughput just measured.
If the link then becomes slower, no time is left for later parts. Here every part is a stored entry,
first sent at the entry's most lossy level, which takes little time. While time is left, the
lossiest parts are read again at better levels. If recomputing all parts meets the deadline, all
parts are recomputed, which is lossless. Functions here only compute: none waits or reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from ragfuse.plan.cost import Blend, CostModel
from ragfuse.types.keys import ChunkKey
from ragfuse.types.plan import Fetch, LoadPlan, is_blended

AS_TEXT, AS_RAW = "text", "raw"
"""A part sent as text is recomputed. A part sent raw needs no decoding."""
COMPUTE_MARGIN = 1.15
"""Safety factor on predicted compute times."""
PATIENCE = 2.0
"""A part is first checked for lateness after this multiple of its predicted reading time."""
BACKOFF = 1.5
"""The next check for lateness comes after this multiple of the time already waited."""
MIN_THROUGHPUT = 1e-9
"""Minimum divisor in bytes per second, so that no division is by zero."""
NEVER_LATE_S = 0.02
"""Minimum seconds before a part can count as late."""


@dataclass(frozen=True)
class StreamPart:
    """A part of a stream: one stored entry, read once for all segments that use the entry.

    Args:
        fetch: A fetch of the entry, with key, tier, and bytes by codec level.
        segments: Indices of the prompt's segments that use rows of the entry.
        tokens: Total number of tokens in `segments`.
        text_s: Seconds that recomputing `segments` adds to the prefill. None if unknown.
        decode_s: Seconds to decode the entry, by codec level.
    """

    fetch: Fetch
    segments: tuple[int, ...]
    tokens: int
    text_s: float | None = None
    decode_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of the entry at each stored codec level, least lossy level first."""
        return dict(self.fetch.sizes)

    def seconds(self, level: str, rank: int, throughput: float) -> tuple[float, float]:
        """Return the seconds to read and to decode the part.

        Args:
            level: The codec level. If the part lacks it, the part's level at index `rank` is read.
            rank: The index of `level` among the levels of the stream's first remaining part.
            throughput: Bytes per second.
        """
        levels = list(self.sizes)
        own = level if level in levels else levels[min(rank, len(levels) - 1)]
        return self.sizes[own] / max(throughput, MIN_THROUGHPUT), self.decode_s.get(own, 0.0)


def first_level(
    remaining: Sequence[StreamPart],
    throughput: float | None,
    left_s: float,
    is_whole: bool = True,
) -> str:
    """Return the codec level at which to send the first of the parts that were not sent yet.

    If nothing lossy was sent and recomputing all remaining parts meets the deadline, the part is
    recomputed, or read raw if raw is faster. In all other cases, the part is sent at the most lossy
    level.

    Args:
        remaining: All remaining parts.
        throughput: Bytes per second of the link for this stream. None if unknown.
        left_s: Seconds to the deadline, less the compute time that remains in any case.
        is_whole: True if nothing lossy was sent yet.

    Returns:
        `AS_TEXT`, `AS_RAW` or another codec level of the first part.
    """
    levels = list(remaining[0].sizes)
    text_s = _text_s(remaining)
    if not (is_whole and text_s < inf and COMPUTE_MARGIN * text_s <= left_s):
        return levels[-1]
    if AS_RAW not in levels or throughput is None:
        return AS_TEXT
    return AS_RAW if delay_s(remaining, AS_RAW, throughput) < text_s else AS_TEXT


def better_level(
    remaining: Sequence[StreamPart],
    better: Sequence[str],
    throughput: float,
    left_s: float,
) -> str:
    """Return a better level at which the first of the lossiest parts is sent again, or "".

    The result is the least lossy level at which all parts meet the deadline. If there is none, the
    result is the most lossy level of `better`, or "" if even the first part would be late.

    Args:
        remaining: The lossiest parts.
        better: The first part's levels that are better than the level sent, least lossy first.
        throughput: Bytes per second of the link for this stream.
        left_s: Seconds to the deadline.
    """
    in_time = (level for level in better if delay_s(remaining, level, throughput) <= left_s)
    level = next(in_time, better[-1])
    return level if delay_s(remaining[:1], level, throughput) <= left_s else ""


def delay_s(remaining: Sequence[StreamPart], level: str, throughput: float) -> float:
    """Return the seconds to read and decode all parts at one level; reads overlap decoding."""
    rank = list(remaining[0].sizes).index(level)
    read_s = done_s = 0.0
    for part in remaining:
        part_read_s, decode_s = part.seconds(level, rank, throughput)
        read_s += part_read_s
        done_s = max(done_s, read_s) + decode_s
    return done_s


def first_look_s(part: StreamPart, level: str, throughput: float | None) -> float | None:
    """Return the seconds until a part is first checked for lateness. None means no checks."""
    if throughput is None:
        return None if part.text_s is None else max(NEVER_LATE_S, part.text_s)
    return max(NEVER_LATE_S, PATIENCE * part.sizes[level] / max(throughput, MIN_THROUGHPUT))


def is_given_up(
    remaining: Sequence[StreamPart], level: str, waited_s: float, left_s: float
) -> bool:
    """Return whether to recompute the current, late part instead of waiting for it.

    The part is recomputed if waiting would make any part late and recomputing is faster than
    waiting. It is assumed that the remaining wait equals the wait so far and the link stays slow.

    Args:
        remaining: The current part, followed by all later parts.
        level: The codec level of the current part.
        waited_s: Seconds waited for the current part so far.
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
    delays = (delay_s(remaining, level, throughput) for level in remaining[0].sizes)
    return min((*delays, _text_s(remaining)))


def _text_s(remaining: Sequence[StreamPart]) -> float:
    """Return the seconds to recompute all parts; infinite if unknown for a part."""
    return sum(inf if part.text_s is None else part.text_s for part in remaining)


def parts_of(plan: LoadPlan, fetches: Sequence[Fetch], costs: CostModel | None) -> list[StreamPart]:
    """Return one stream part for each entry that `fetches` read.

    Args:
        plan: The load plan.
        fetches: The fetches of `plan` to stream.
        costs: Costs of computing on this machine. None if unknown.
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
