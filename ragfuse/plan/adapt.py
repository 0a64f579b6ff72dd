"""How the next piece of a stream comes: as text, which is computed, or at a level (CacheGen 5.3 and its algorithm 1).

Text is the level without loss. It wins wherever it meets the deadline; else the level with the least loss that does,
else whatever is done soonest. Raw KV, which the paper does not send, loses nothing either: where both are in time, the
sooner is taken. Arithmetic only: throughput and seconds are handed in, nothing here waits or reads.

The two differ in what text must fit into what is left of the deadline: in 5.3 all pieces that are still to come, as for
every other level; in algorithm 1 the next one alone. Both bet on the line staying as it is: what comes without loss
first leaves no time for the rest where it falls. So a third way has every piece come with much loss at first, and again
with less while time is left: levels are streams of their own, and the least of them takes a small part of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Literal

Adapt = Literal["refine", "paper", "algorithm"]
"""Something of every piece first, and better levels while time is left; section 5.3 of the paper; its algorithm 1."""
AS_TEXT, AS_RAW = "text", "raw"
"""What comes as text is computed. What comes raw is as it was computed."""
PIECE_TOKENS = 1500
"""Tokens of a piece, about: small enough to answer to a line that changes, large enough to be computed at once."""

STEPS_PER_PIECE = 6
"""A piece is read in at most so many steps, some layers at a time, so that what a line does is seen within it."""
STEP_S = 0.05
"""Seconds that a step takes at least, if more than one: each costs a round trip."""
SAFE = 0.15
"""Where better levels may follow, one comes at once only if it were in time on a line that is so many times as fast."""
LONGER = 1.15
"""Computing may take so many times as long as was foreseen, where bytes would do."""
PROBE = 0.1
"""Of the seconds that computing a piece takes: how long a line that stood still is asked for it."""
PATIENCE = 2.0
"""A piece that takes so many times as long as was foreseen is looked at again."""
AGAIN = 1.5
"""And then after so many times as long as it was waited for."""
MIN_THROUGHPUT = 1e-9
"""Stands for a throughput of nothing."""
NEVER_LATE_S = 0.02
"""Seconds before which nothing is late: below that, waiting says more of the machine than of the line."""


@dataclass(frozen=True)
class StreamPart:
    """A segment of a prompt that is to come. sizes: bytes by level, the least lossy first. decode_s: seconds by level.

    text_s: seconds that computing it adds to the prompt's; None: not known, and text is no choice then. also: further
    segments that take their rows from the same entry, which is read once; tokens and text_s are of all.
    """

    segment: int
    tokens: int
    sizes: Mapping[str, int]
    text_s: float | None = None
    decode_s: Mapping[str, float] = field(default_factory=dict)
    also: tuple[int, ...] = ()

    def and_for(self, other: StreamPart) -> StreamPart:
        """The same for a further segment that takes its rows from the same entry."""
        also, tokens = (*self.also, other.segment), self.tokens + other.tokens
        return replace(self, also=also, tokens=tokens, text_s=_sum((self.text_s, other.text_s)))

    def rest(self, share: float, banned: Collection[str] = ()) -> StreamPart:
        """The same with a share of its bytes left, and not at those levels."""
        sizes = {level: ceil(share * size) for level, size in self.sizes.items() if level not in banned}
        return replace(self, sizes=sizes, decode_s={level: share * each for level, each in self.decode_s.items()})


@dataclass(frozen=True)
class StreamPiece:
    """Parts that come together, in the order of the prompt."""

    parts: tuple[StreamPart, ...]

    @property
    def segments(self) -> tuple[int, ...]:
        """Which of the prompt's they are."""
        return tuple(part.segment for part in self.parts)

    @property
    def tokens(self) -> int:
        """Of all parts."""
        return sum(part.tokens for part in self.parts)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes by those levels that all parts have, the least lossy first."""
        first, *others = (part.sizes for part in self.parts)
        return {
            level: size + sum(other[level] for other in others)
            for level, size in first.items()
            if all(level in other for other in others)
        }

    @cached_property
    def text_s(self) -> float | None:
        """Seconds to compute all parts; None: not known."""
        return _sum(part.text_s for part in self.parts)

    def decode_s(self, level: str) -> float:
        """Seconds to decode all parts."""
        return sum(part.decode_s.get(level, 0.0) for part in self.parts)

    def seconds(self, level: str, rank: int, throughput: float) -> tuple[float, float]:
        """To read and to decode it at a level that is another piece's `rank`-th; lacking it, at its own of that rank.

        Where it has none at all, it is computed.
        """
        levels = list(self.sizes)
        if not levels:
            return 0.0, self.text_s or 0.0
        own = level if level in levels else levels[min(rank, len(levels) - 1)]
        return self.sizes[own] / max(throughput, MIN_THROUGHPUT), self.decode_s(own)

    def rest(self, segments: Collection[int], share: float, banned: Collection[str] = ()) -> StreamPiece:
        """What is still to come of these: a share of all bytes, and not at those levels; computed, it takes as long."""
        parts = (part for part in self.parts if part.segment in segments)
        return StreamPiece(tuple(part.rest(share, banned) for part in parts))


def pieces(parts: Sequence[StreamPart], most: int = PIECE_TOKENS) -> list[StreamPiece]:
    """Parts in order, as many together as have at most so many tokens and the same levels; a longer one alone."""
    cut: list[list[StreamPart]] = []
    for part in parts:
        alike = bool(cut) and list(part.sizes) == list(cut[-1][-1].sizes)
        if not alike or sum(each.tokens for each in cut[-1]) + part.tokens > most:
            cut.append([])
        cut[-1].append(part)
    return [StreamPiece(tuple(each)) for each in cut]


def decide(
    left: Sequence[StreamPiece],
    throughput: float | None,
    left_s: float,
    sharing: int = 1,
    adapt: Adapt = "paper",
) -> str:
    """`AS_TEXT` or the level of the first of the pieces that are still to come.

    throughput: bytes a second of the line, as last seen; None: not known, then a medium level unless text is in time.
    left_s: until the deadline, without what must be computed in any case. sharing: streams on that line, this one too
    (the paper's N_c).
    """
    text_s = _sum(piece.text_s for piece in (left if adapt == "paper" else left[:1]))
    levels, is_text_in_time = list(left[0].sizes), text_s is not None and text_s <= left_s
    if not levels or throughput is None:
        return AS_TEXT if is_text_in_time or not levels else levels[len(levels) // 2]
    delays, all_s = {level: delay_s(left, level, throughput, sharing) for level in levels}, _total_text_s(left)
    if is_text_in_time:
        return AS_RAW if delays.get(AS_RAW, inf) < min(left_s, inf if all_s is None else all_s) else AS_TEXT
    return next((level for level in levels if delays[level] <= left_s), None) or _soonest(delays, all_s)


def decide_first(
    left: Sequence[StreamPiece],
    throughput: float | None,
    left_s: float,
    sharing: int = 1,
    *,
    is_whole: bool,
    has_begun: bool,
) -> str:
    """`AS_TEXT` or the level of the first of these pieces, where better ones may follow once something of all is there.

    Text as in `decide`, as long as nothing was lost that need not be (`is_whole`). Else the level with the least loss
    that were in time on a line `SAFE` times as fast, else the one with the most: a line that falls then costs quality,
    not the deadline. What is late even so is computed where that is sooner, once the piece `has_begun` and so tells of
    the line as it is.
    """
    levels, text_s = list(left[0].sizes), _total_text_s(left)
    if not levels or (is_whole and text_s is not None and LONGER * text_s <= left_s):
        return decide(left, throughput, left_s, sharing)
    last, own_s = levels[-1], left[0].text_s
    if throughput is None:
        return last
    in_time = (level for level in levels if delay_s(left, level, SAFE * throughput, sharing) <= left_s)
    level = next(in_time, last)
    if level == last and has_begun and own_s is not None and delay_s(left, last, throughput, sharing) > left_s:
        rather = 1.0 if text_s is not None and LONGER * text_s <= left_s else PATIENCE
        return AS_TEXT if rather * own_s < delay_s(left[:1], last, throughput, sharing) else last
    return level


def decide_better(
    left: Sequence[StreamPiece], better: Sequence[str], throughput: float, left_s: float, sharing: int = 1
) -> str:
    """At which level what is there of these comes once more, as it lost most; "" for none.

    better: levels of the first piece that lose less than what is there, the least lossy first. The first of these at
    which all would be in time, else the last, where at least the first piece would be.
    """
    in_time = (level for level in better if delay_s(left, level, throughput, sharing) <= left_s)
    level = next(in_time, better[-1])
    return level if delay_s(left[:1], level, throughput, sharing) <= left_s else ""


def delay_s(left: Sequence[StreamPiece], level: str, throughput: float, sharing: int = 1) -> float:
    """Until all of these are decoded at one level, each while the next is on its way."""
    rank = list(left[0].sizes).index(level)
    read_s = done_s = 0.0
    for piece in left:
        alone_s, then_s = piece.seconds(level, rank, throughput)
        read_s += sharing * alone_s
        done_s = max(done_s, read_s) + then_s
    return done_s


def layers_together(n_layers: int, left: int, whole_s: float | None) -> int:
    """How many of the layers that are left of a piece are read next; whole_s: seconds of all of it, None: not known."""
    steps = STEPS_PER_PIECE if whole_s is None else max(1, min(STEPS_PER_PIECE, int(whole_s / STEP_S)))
    return min(left, ceil(n_layers / steps))


def first_look_s(
    piece: StreamPiece, level: str, throughput: float | None, sharing: int = 1, stood: bool = False
) -> float | None:
    """How long to wait for a piece before looking whether it is late; None: as long as the tier itself does.

    Where nothing is known of the line: as long as computing the piece takes. stood: the line stood still when it was
    asked last; then for a small part of that.
    """
    if throughput is None:
        return None if piece.text_s is None else max(NEVER_LATE_S, piece.text_s)
    wait_s = PATIENCE * sharing * piece.sizes[level] / max(throughput, MIN_THROUGHPUT)
    return max(NEVER_LATE_S, min(wait_s, PROBE * piece.text_s) if stood and piece.text_s is not None else wait_s)


def is_late(left: Sequence[StreamPiece], share: float, nbytes: int, waited_s: float, left_s: float) -> bool:
    """Whether waiting for the piece at hand would be too late for the deadline, as a step of it is late.

    share: of the piece, that is still to come behind the step; nbytes: of the step. It is taken to need as long again
    as it was waited for, and the line to stay as slow.
    """
    return _waiting_s(left, share, nbytes, waited_s) > left_s


def is_given_up(left: Sequence[StreamPiece], share: float, nbytes: int, waited_s: float, left_s: float) -> bool:
    """Whether the piece at hand is better computed than waited for, as a step of it is late: as `is_late` has it.

    What can be in time is waited for.
    """
    if left[0].text_s is None:
        return False
    waiting_s = _waiting_s(left, share, nbytes, waited_s)
    return waiting_s > left_s and left[0].text_s + _soonest_s(left[1:], _slow(nbytes, waited_s)) < waiting_s


def spare_s(left: Sequence[StreamPiece], left_s: float) -> float:
    """How long to wait for these in any case, where nothing else is left to bring.

    Not at all where all of them could be computed in time, which loses nothing; else until the deadline, as only their
    bytes can be in time then.
    """
    text_s = _total_text_s(left)
    return 0.0 if text_s is None or LONGER * text_s <= left_s else left_s


def _waiting_s(left: Sequence[StreamPiece], share: float, nbytes: int, waited_s: float) -> float:
    """Until all of these are there, if the step at hand takes as long again as it was waited for."""
    behind = [left[0].rest(left[0].segments, share)] if share > 0 else []
    return waited_s + _soonest_s([*behind, *left[1:]], _slow(nbytes, waited_s))


def _slow(nbytes: int, waited_s: float) -> float:
    """Bytes a second of a line that takes so long again."""
    return nbytes / max(2 * waited_s, MIN_THROUGHPUT)


def _soonest_s(left: Sequence[StreamPiece], throughput: float) -> float:
    """Seconds until all of these are there or computed, whatever that loses."""
    if not left:
        return 0.0
    text_s = _total_text_s(left)
    delays = (delay_s(left, level, throughput) for level in left[0].sizes)
    return min((*delays, inf if text_s is None else text_s))


def _soonest(delays: Mapping[str, float], text_s: float | None) -> str:
    level = min(delays, key=lambda each: delays[each])
    return AS_TEXT if text_s is not None and text_s < delays[level] else level


def _total_text_s(left: Sequence[StreamPiece]) -> float | None:
    """Seconds to compute all of these."""
    return _sum(piece.text_s for piece in left)


def _sum(each: Iterable[float | None]) -> float | None:
    """None where one of them is not known."""
    known = list(each)
    return None if None in known else sum(seconds for seconds in known if seconds is not None)
