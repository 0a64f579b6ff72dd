"""At which codec level, and from which tier, each segment is read where several are at hand. Decisions only.

What loses least is read while its loading hides behind computing; where the first token waits for it, segments go on to
levels that lose more and come sooner, those first that gain most, until it comes about as soon as it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ragfuse.plan.estimate import Estimate
from ragfuse.types.keys import ChunkKey
from ragfuse.types.kv import Entry
from ragfuse.types.levels import LEVEL_NAMES
from ragfuse.types.plan import Fetch

Offers = Mapping[int, Sequence[Fetch]]
"""By segment: all ways to read it, what loses least first, and of these the soonest."""
WORTH = 0.1
"""A level that loses more is worth it only where the first token comes by more than this share sooner."""
LEVEL_STEPS = 8
"""So many steps bring all segments from one level to the next, at least."""


def loss(level: str) -> int:
    """How much a level loses, as a number to compare; one that nobody knows the most."""
    return LEVEL_NAMES.index(level) if level in LEVEL_NAMES else len(LEVEL_NAMES)


def offers(
    times: Estimate, fetches: Iterable[Fetch], entries: Mapping[ChunkKey, Entry], others: Mapping[ChunkKey, list[Entry]]
) -> Offers:
    """The ways to read these segments: `entries` as they were found, and `others` of the same keys in other tiers."""
    found = {}
    for fetch in fetches:
        there = [entries[fetch.key], *others.get(fetch.key, ())]
        ways = [
            Fetch(fetch.segment, entry.key, entry.tier, level, nbytes, entry.n_tokens, tuple(entry.sizes.items()))
            for entry in there
            for level, nbytes in entry.sizes.items()
            if entry.n_tokens == fetch.n_tokens
        ]
        known = [way for way in ways if times.knows([way])]
        found[fetch.segment] = sorted(known or [fetch], key=lambda way: (loss(way.level), _s(times, way)))
    return found


def finest(offers: Offers) -> dict[int, Fetch]:
    """What loses least of every segment."""
    return {at: ways[0] for at, ways in offers.items()}


def soonest(times: Estimate, offers: Offers) -> dict[int, Fetch]:
    """What comes soonest of every segment; of those that do, what loses least."""
    return {at: min(ways, key=lambda way: _s(times, way)) for at, ways in offers.items()}


def coarser(times: Estimate, offers: Offers, taken: Mapping[int, Fetch]) -> dict[int, Fetch] | None:
    """The same with some segments read sooner at levels that lose more; None where there are no such."""
    gains = dict[int, tuple[float, Fetch]]()
    for at, now in taken.items():
        now_s = _s(times, now)
        behind = offers[at][offers[at].index(now) + 1 :]
        sooner = next((way for way in behind if _s(times, way) < now_s), None)
        if sooner is not None:
            gains[at] = now_s - _s(times, sooner), sooner
    best = sorted(gains, key=lambda at: -gains[at][0])[: -(-len(taken) // LEVEL_STEPS)]
    return {**taken, **{at: gains[at][1] for at in best}} if best else None


def _s(times: Estimate, way: Fetch) -> float:
    return times.fetch_s(way) if times.knows([way]) else 0.0
