"""How each part of a stream is sent: as text to recompute, or at a codec level (CacheGen 5.3).

CacheGen sends a piece at the best level that meets the deadline at the last throughput, so a link
that becomes slower leaves no time for the rest. Here every part, which is a stored entry, first
comes at its most lossy level, which takes little of the time, and the lossiest ones are read again
at better levels while time is left. Where all can be recomputed in time, they are: that is
lossless.
Arithmetic only: throughput and seconds are arguments, nothing here waits or reads.
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
"""A part sent as text is recomputed. A part sent raw is used as it is, without decoding."""
COMPUTE_MARGIN = 1.15
"""Safety factor for computing: assume that it takes this many times as long as predicted."""
PATIENCE = 2.0
"""A part is checked for lateness once it took this many times as long as predicted."""
BACKOFF = 1.5
"""The next check for lateness comes after this many times the time already waited."""
MIN_THROUGHPUT = 1e-9
"""Stands for a throughput of zero, in bytes per second."""
NEVER_LATE_S = 0.02
"""Seconds within which no part counts as late."""


@dataclass(frozen=True)
class StreamPart:
    """An entry that is to be streamed.

    Args:
        fetch: How it is found; with its bytes by codec level, the least lossy first.
        segments: The segments of the prompt that use rows of it, which is read once.
        tokens: The tokens of these segments.
        text_s: Seconds that recomputing them adds to the prefill; None: unknown, so that they
            cannot be sent as text.
        decode_s: Seconds to decode it, by codec level.
    """

    fetch: Fetch
    segments: tuple[int, ...]
    tokens: int
    text_s: float | None = None
    decode_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes at each level, the least lossy first."""
        return dict(self.fetch.sizes)

    def seconds(self, level: str, rank: int, throughput: float) -> tuple[float, float]:
        """Return the seconds to read the part, and to decode it.

        Args:
            level: The codec level. A part that lacks it uses its own level of the same rank; one
                without any level is recomputed.
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
    """Return how to send the first of the remaining parts, for which better levels may follow.

    While nothing lossy was sent and all parts can be recomputed in time, they are, or are read raw
    where that is faster. Else the part comes at its most lossy level; without levels it is
    recomputed.

    Args:
        remaining: All remaining parts.
        throughput: Bytes per second that the link has for this stream; None: unknown.
        left_s: Seconds to the deadline, without those for what is computed in any case.
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
    """Return the level at which to send the lossiest parts once more; "" for none.

    Args:
        remaining: These parts.
        better: Levels of the first part that are less lossy than what was sent, the least lossy
            first. The first at which all parts meet the deadline is chosen; else the last, if the
            first part meets it.
        throughput: Bytes per second that the link has for this stream.
        left_s: Seconds to the deadline.
    """
    in_time = (level for level in better if delay_s(remaining, level, throughput) <= left_s)
    level = next(in_time, better[-1])
    return level if delay_s(remaining[:1], level, throughput) <= left_s else ""


def delay_s(remaining: Sequence[StreamPart], level: str, throughput: float) -> float:
    """Return the seconds to read and decode all parts at one level, decoding while reading."""
    rank = list(remaining[0].sizes).index(level)
    read_s = done_s = 0.0
    for part in remaining:
        part_read_s, decode_s = part.seconds(level, rank, throughput)
        read_s += part_read_s
        done_s = max(done_s, read_s) + decode_s
    return done_s


def first_look_s(part: StreamPart, level: str, throughput: float | None) -> float | None:
    """Return the seconds before a part is checked for lateness; None: the tier's own timeout."""
    if throughput is None:
        return None if part.text_s is None else max(NEVER_LATE_S, part.text_s)
    return max(NEVER_LATE_S, PATIENCE * part.sizes[level] / max(throughput, MIN_THROUGHPUT))


def is_given_up(
    remaining: Sequence[StreamPart], level: str, waited_s: float, left_s: float
) -> bool:
    """Return whether to recompute the current part, which is late, instead of waiting.

    A part that can still meet the deadline is waited for. It is assumed to need as long again as
    it was waited for, and the link to stay as slow.

    Args:
        remaining: The current part and those after it.
        level: The codec level of the current part.
        waited_s: Seconds that it was waited for.
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
    """Return a stream part for each entry that these fetches of a plan read.

    Args:
        plan: The plan.
        fetches: Its fetches to stream.
        costs: What computing costs on this machine; None: nothing is known.
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
